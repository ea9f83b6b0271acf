"""Problems of dilated attention, as data, with their arrays in numpy; padding is NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from ring_attn_core import Band, causal, full, sliding_window
from ring_attn_core.reference.dilated import DilatedFeatures, exact, plain
from ring_attn_core.reference.oracle import Attention, rounding
from ring_attn_core.reference.tolerance import UNIT_ROUNDOFF, bound, relative_error

CAUSAL = causal()


@dataclass(frozen=True)
class Case:
    """One problem. ``local``: tokens of a rank's shard. ``length``: true tokens, None: all. ``key_mask``: a random one."""

    segments: tuple[int, ...] = (8, 16)
    dilations: tuple[int, ...] = (1, 2)
    ranks: int = 4
    local: int = 8
    heads: int = 4
    kv_heads: int = 4
    mixing: str = "softmax"
    mask: Band = CAUSAL
    length: int | None = None
    key_mask: bool = False
    dtype: str = "float32"
    head_dim: int = 8
    v_dim: int = 7
    batch: int = 2
    scale: float | None = None
    softcap: float | None = None
    data: int = 0

    def __str__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return ",".join(
            f"{name}={x}".replace(" ", "") for name, x in values.items() if x != getattr(Case, name) or name == "ranks"
        )

    @property
    def tokens(self) -> int:
        """The number of true tokens."""
        return self.ranks * self.local if self.length is None else self.length

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """q, k, v, dout and dlse; values that the dtype holds exactly."""
        rng = np.random.default_rng(self.data)
        q, kv = (self.batch, self.tokens, self.heads), (self.batch, self.tokens, self.kv_heads)
        shapes = {"q": (*q, self.head_dim), "k": (*kv, self.head_dim), "v": (*kv, self.v_dim), "dout": (*q, self.v_dim)}
        data = np.float64 if self.dtype == "float64" else np.float32
        arrays = {name: rounding(self.dtype)(rng.standard_normal(shape).astype(data)) for name, shape in shapes.items()}
        return arrays | {"dlse": rng.standard_normal(q).astype(data)}

    @property
    def seen_keys(self) -> np.ndarray | None:
        """The key mask, bool [b tokens]."""
        return np.random.default_rng(1).random((self.batch, self.tokens)) < 0.7 if self.key_mask else None

    @property
    def call(self) -> DilatedFeatures:
        """The oracle's arguments."""
        return DilatedFeatures(self.segments, self.dilations, self.mixing, self.mask, self.seen_keys, self.scale, self.softcap)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of ``dilated_attention`` that are not arrays."""
        names = "segments", "dilations", "mixing", "mask", "length", "scale", "softcap"
        return {name: getattr(self, name) for name in names}

    @cached_property
    def expected(self) -> Attention:
        return exact(**self.arrays, call=self.call)

    @cached_property
    def plain(self) -> Attention:
        return plain(**self.arrays, call=self.call, dtype=self.dtype)

    def given(self, **arrays: np.ndarray) -> Case:
        """Return the same case with other arrays."""
        other = replace(self)
        other.arrays.update(arrays)
        return other

    def inputs(self) -> dict[str, np.ndarray]:
        """Return q, k, v, dout, dlse and the key mask, whole, with padding: NaN, and keys that the mask shows."""
        missing = self.ranks * self.local - self.tokens
        pad = lambda x, fill: np.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)], constant_values=fill)
        padded = {name: pad(x, np.nan) for name, x in self.arrays.items()}
        return padded if self.seen_keys is None else padded | {"key_mask": pad(self.seen_keys, True)}

    def shards(self) -> list[dict[str, np.ndarray]]:
        """Return the inputs of every rank."""
        split = {name: np.split(x, self.ranks, 1) for name, x in self.inputs().items()}
        return [{name: x[rank] for name, x in split.items()} for rank in range(self.ranks)]


def whole(shards: Sequence[Sequence[np.ndarray]]) -> Attention:
    """Return the whole arrays of every rank's (out, lse, dq, dk, dv)."""
    return Attention(*(np.concatenate(x, 1) for x in zip(*shards, strict=True)))


def by_name(got: Attention) -> dict[str, np.ndarray]:
    """Return out, lse, dq, dk and dv by name."""
    return {"out": got.out, "lse": got.lse, "dq": got.dq, "dk": got.dk, "dv": got.dv}


def check(case: Case, got: Attention) -> None:
    """Assert that whole arrays, padding included, are right within the computed bound.

    The bound has one rounding more than that of ``ring_attention``, because rounded results of patterns are summed.
    """
    expected, roughly = by_name(case.expected), by_name(case.plain)
    for name, mine in by_name(got).items():
        truth, rough = expected[name], roughly[name]
        np.testing.assert_array_equal(mine[:, case.tokens :], -np.inf if name == "lse" else 0, err_msg=f"{name} at padding")
        error, allowed = (
            relative_error(mine[:, : case.tokens], truth),
            bound(rough, truth, case.dtype) + 2 * UNIT_ROUNDOFF[case.dtype],
        )
        assert error <= allowed, f"{name}: error {error:.3g} against float64, allowed {allowed:.3g} ({case})"


CASES = [
    Case(ranks=1),
    Case(ranks=2, local=16, segments=(4, 8, 32), dilations=(1, 2, 4), kv_heads=2),
    Case((5, 12, 24), (1, 4, 3), ranks=3, local=7, heads=3, kv_heads=1),
    Case((6, 14, 64), (2, 7, 16), ranks=4, local=9, heads=6, kv_heads=2, length=31),
    Case((3, 10), (3, 5), ranks=8, local=3, heads=3, kv_heads=3, mask=full()),
    Case((4, 8, 12), (1, 2, 4), ranks=4, local=6, heads=8, kv_heads=2, mixing="heads"),
    Case((4, 6, 40), (2, 3, 5), ranks=3, local=7, heads=7, kv_heads=7, mixing="heads", mask=full(), length=18),
    Case((9, 27), (1, 3), ranks=8, local=5, mask=sliding_window(6), kv_heads=1, length=37),
    Case((8, 32), (2, 4), ranks=4, heads=8, kv_heads=2, mask=sliding_window(9, 3)),
    Case((7, 20), (1, 2), ranks=2, local=11, key_mask=True, mask=full(), kv_heads=2),
    Case((8, 32), (4, 8), ranks=4, heads=2, kv_heads=1, key_mask=True),
    Case((6, 64), (2, 1), ranks=4, local=5, heads=5, kv_heads=1, scale=0.7, softcap=2.0),
    Case((16, 64), (16, 8), ranks=2, local=6, heads=3, kv_heads=3, batch=1),
    Case((8, 64), (2, 4), ranks=1, local=13, heads=4, kv_heads=4, mixing="heads", mask=causal(2)),
    Case((8, 12), (2, 4), ranks=4, local=6, mask=causal(-3), kv_heads=2),
    Case((12,), (3,), ranks=3, local=4, heads=6, kv_heads=1, length=10),
    Case((8, 16, 32), (1, 2, 4), ranks=4, heads=8, kv_heads=4, dtype="bfloat16", head_dim=16, v_dim=16),
    Case((6, 18), (2, 3), ranks=2, local=9, dtype="float64"),
    Case((4, 8), (4, 8), ranks=2, local=8, heads=3, kv_heads=3, scale=1e5, mask=full()),
]
"""Rings of 1 to 8, odd shards, padding, segments that neither divide nor fit, shared key heads, windows, offsets, a key mask.

Also dilations that do not divide a shard, exceed the heads or do not divide them, both mixings, bfloat16, float64, huge scores.
"""

PUBLISHED = Case((2048, 4096, 8192), (1, 2, 4), ranks=4, local=2048, heads=4, kv_heads=4, head_dim=4, v_dim=4, batch=1)
"""The segments and dilations of LongNet (arXiv:2307.02486, section 4.2); every head keeps a quarter of the longest segment."""


def drawn(rng: np.random.Generator, ranks: int) -> Case:
    """Return a random case on a ring of ``ranks``."""
    n, local = int(rng.integers(1, 4)), int(rng.integers(1, 13))
    tokens = ranks * local
    dilations = [int(x) for x in rng.choice([1, 2, 3, 4, 5, 8, 16], n)]
    pairs, longest = [], 0
    for dilation in dilations:  # segments increase and are multiples of their dilations
        longest = dilation * (longest // dilation + int(rng.integers(1, max(2, tokens // dilation))))
        pairs.append((longest, dilation))
    mixing = "heads" if rng.random() < 0.4 else "softmax"
    kv_heads = int(rng.integers(1, 4))
    heads = kv_heads * int(rng.integers(1, 5))
    if heads < n:
        mixing = "softmax"
    before, after = int(rng.integers(0, 9)), int(rng.integers(0, 5))
    return Case(
        tuple(segment for segment, _ in pairs),
        tuple(dilation for _, dilation in pairs),
        ranks,
        local,
        heads,
        kv_heads,
        mixing,
        [causal(), full(), sliding_window(before), sliding_window(before, after), causal(after - 2)][int(rng.integers(5))],
        int(rng.integers(1, tokens + 1)) if rng.random() < 0.4 else None,
        bool(rng.random() < 0.2),
        head_dim=4,
        v_dim=3,
        batch=int(rng.integers(1, 3)),
        data=int(rng.integers(2**31)),
    )
