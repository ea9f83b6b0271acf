"""The cases of summary attention for both frameworks, as data, with their arrays in numpy; and a layer of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from ring_attn_core.reference.oracle import rounding
from ring_attn_core.reference.summary import SummaryAttended, SummaryFeatures, exact_summary, plain_summary
from ring_attn_core.reference.tolerance import bound, relative_error
from ring_attn_core.variants.summary import SummaryOptions, SummaryPlan

from .models import BATCH, LAYER, LENGTH, Arrays, rotate


@dataclass(frozen=True)
class SummaryCase:
    """One problem. ``masked``: a key mask masks about every fourth key, and whole blocks. ``more``: padding tokens per rank."""

    ranks: int = 4
    block: int = 4
    window: int = 7
    summaries: int = 2
    pooling: str = "attention"
    heads: int = 4
    kv_heads: int = 2
    length: int = 37
    more: int = 0
    dtype: str = "float32"
    masked: bool = False
    scale: float | None = None
    softcap: float | None = None
    head_dim: int = 16
    v_dim: int = 8
    batch: int = 2

    def __str__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return ",".join(f"{name}={x}" for name, x in values.items() if x != getattr(SummaryCase, name) or name == "ranks")

    @property
    def local(self) -> int:
        return -(-self.length // self.ranks) + self.more

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of ``summary_attention`` that are not arrays."""
        names = "block", "window", "summaries", "pooling", "scale", "softcap", "length"
        return {name: getattr(self, name) for name in names}

    @property
    def plan(self) -> SummaryPlan:
        return SummaryPlan(SummaryOptions(**self.options), self.ranks, self.local)

    @cached_property
    def arrays(self) -> Arrays:
        """q, k, v, dout and dlse in natural order, and pool and key_mask if the case has them; values that the dtype holds."""
        rng, data = np.random.default_rng(1), np.float64 if self.dtype == "float64" else np.float32
        rows = self.batch, self.length
        of_q, of_k = (*rows, self.heads), (*rows, self.kv_heads)
        shapes = {"q": (*of_q, self.head_dim), "k": (*of_k, self.head_dim), "v": (*of_k, self.v_dim), "dout": (*of_q, self.v_dim)}
        shapes |= {"pool": (self.summaries, self.kv_heads, self.head_dim)} if self.pooling == "attention" else {}
        drawn = {name: rounding(self.dtype)(rng.standard_normal(shape).astype(data)) for name, shape in shapes.items()}
        drawn["dlse"] = rng.standard_normal(of_q).astype(data)
        if self.masked:
            drawn["key_mask"] = rng.random(rows) < 0.75
            drawn["key_mask"][0, self.block : 2 * self.block] = False
            drawn["key_mask"][1, : self.block + 1] = False
        return drawn

    @property
    def whole(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """q, k, v, dout and dlse, in the order of the oracle's arguments."""
        arrays = self.arrays
        return arrays["q"], arrays["k"], arrays["v"], arrays["dout"], arrays["dlse"]

    @property
    def asked(self) -> SummaryFeatures:
        optional = {name: self.arrays[name] for name in ("pool", "key_mask") if name in self.arrays}
        return SummaryFeatures(self.block, self.window, self.summaries, scale=self.scale, softcap=self.softcap, **optional)

    @cached_property
    def expected(self) -> SummaryAttended:
        return exact_summary(*self.whole, self.asked)

    @cached_property
    def plain(self) -> SummaryAttended:
        return plain_summary(*self.whole, self.asked, self.dtype)

    def given(self, **arrays: np.ndarray) -> SummaryCase:
        """Return the same case with other arrays."""
        other = replace(self)
        other.arrays.update(arrays)
        return other

    def allowed(self, name: str) -> float:
        """Return the computed bound of the error of a result.

        The gradient dpool has few numbers, each a sum over all tokens, which the plain computation may get right by luck: its
        bound is the largest under four draws of the cotangents.
        """
        truth = getattr(self.expected, name)
        allowed = bound(getattr(self.plain, name), truth, self.dtype)
        if name != "dpool":
            return allowed
        for seed in range(3):
            rng = np.random.default_rng(seed)
            other = {x: rng.permutation(self.arrays[x].ravel()).reshape(self.arrays[x].shape) for x in ("dout", "dlse")}
            case = self.given(**other)
            allowed = max(allowed, bound(case.plain.dpool, case.expected.dpool, self.dtype))  # type: ignore[arg-type]
        return allowed

    def check(self, got: Sequence[np.ndarray | None]) -> None:
        """Assert that out, lse, dq, dk, dv (whole, padding included) and dpool are right, and out 0, lse -inf at padding."""
        for name, mine, truth in zip(SummaryAttended._fields, got, self.expected, strict=True):
            assert (mine is None) == (truth is None), name
            if mine is None or truth is None:
                continue
            if name != "dpool":
                np.testing.assert_array_equal(mine[:, self.length :], -np.inf if name == "lse" else 0, err_msg=name)
                mine = mine[:, : self.length]
            error, allowed = relative_error(mine, truth), self.allowed(name)
            assert error <= allowed, f"{name}: error {error:.3g} against float64, allowed {allowed:.3g} ({self})"

    def padded(self) -> Arrays:
        """Return the arrays by name, padded to full shards with NaN, which must not be read; the key mask hides no padding."""
        missing = self.local * self.ranks - self.length
        pad = lambda x: np.concatenate([x, np.full((self.batch, missing, *x.shape[2:]), x.dtype == bool or np.nan, x.dtype)], 1)
        return {name: x if name == "pool" else pad(x) for name, x in self.arrays.items()}

    def shards(self) -> list[Arrays]:
        """Return each rank's shards of ``padded``."""
        each = {name: [x] * self.ranks if name == "pool" else np.split(x, self.ranks, 1) for name, x in self.padded().items()}
        return [{name: x[rank] for name, x in each.items()} for rank in range(self.ranks)]


MEAN = "mean"
CASES = [
    SummaryCase(),
    SummaryCase(1, block=5),
    SummaryCase(2, block=7, window=0, summaries=1),
    SummaryCase(3, block=6, window=3, summaries=3, pooling=MEAN),
    SummaryCase(4, block=16, window=5),
    SummaryCase(8, block=13, window=2, summaries=3, more=2),
    SummaryCase(8, block=5, masked=True, summaries=1),
    SummaryCase(4, dtype="bfloat16"),
    SummaryCase(3, block=6, summaries=2, pooling=MEAN, masked=True, softcap=1.5, scale=0.3, heads=3, kv_heads=1),
    SummaryCase(8, block=1, window=0, summaries=1, length=3),
]
MORE = [
    SummaryCase(2, block=3, window=4, summaries=3, length=61, heads=3, kv_heads=1),
    SummaryCase(4, dtype="float64"),
    SummaryCase(4, dtype="bfloat16", masked=True),
    SummaryCase(4, dtype="float16", block=20, softcap=2.0),
    SummaryCase(8, block=2, window=1, length=64, head_dim=7, v_dim=3),
    SummaryCase(3, block=12, window=12, pooling=MEAN, summaries=4, length=36),
]
"""Cases that CI runs with the newest versions only."""

COMPILED = [CASES[i] for i in (0, 3, 5, 6, 7, 8)]
"""The cases that JAX compiles in every run, some seconds each."""

EXACT = [SummaryCase(4, window=36), SummaryCase(4, block=4, summaries=4, window=3, pooling=MEAN, masked=True)]
"""Cases that equal exact attention: a window that covers the sequence, and a summary for every token."""

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"block": 0}, "block must be an int of at least 1, .*, got 0"),
    ({"block": 2.5}, "block must be an int of at least 1, .*, got 2.5"),
    ({"summaries": 0}, "summaries must be an int of at least 1, .*, got 0"),
    ({"summaries": 5}, "summaries=5 of a block of 4 tokens are more than it has: pass at most 4"),
    ({"window": -1}, "window must be an int of at least 0, .*, got -1"),
    ({"pooling": "max"}, "unknown pooling 'max': choose one of attention, mean"),
    ({"pooling": "mean", "summaries": 3}, 'pooling="mean" cuts a block of 4 tokens into summaries=3 equal parts'),
    ({"pooling": "mean"}, 'pooling="mean" learns nothing: leave pool out'),
    ({"pool": None}, r'pooling="attention" needs pool, an array \[summaries, kv_heads, head_dim\] = \[2, 2, 16\]'),
    ({"pool": (1, 2, 16)}, r"pool must be \[summaries, kv_heads, head_dim\] = \[2, 2, 16\], got shape \[1, 2, 16\]"),
    ({"k": (2, 9, 2, 16)}, "q has 37 tokens and k has 9: summary attention is causal self-attention"),
    ({"v": (2, 37, 16)}, r"v must have 4 dimensions .*, got shape \[2, 37, 16\]"),
    ({"key_mask": (2, 9)}, r"key_mask must be \[batch, tokens of k\] = \[2, 37\], got shape \[2, 9\]"),
    ({"length": 99}, "length=99 is more than the 1 shards of q hold"),
    ({"softcap": -1}, "softcap must be a Python number above 0"),
    ({"strategy": "walk"}, "unknown strategy 'walk'"),
    ({"backend": "abacus"}, "unknown backend 'abacus'"),
]
"""Changes of the default case on one rank, arrays by their shapes, and the error of each."""


def refused(change: dict[str, Any]) -> tuple[Arrays, dict[str, Any]]:
    """Return the arrays and the other arguments of a refused call; a shape stands for zeros."""
    case = SummaryCase(ranks=1)
    arrays = {name: case.arrays[name] for name in ("q", "k", "v", "pool")}
    arrays |= {name: x and np.zeros(x, bool if name == "key_mask" else np.float32) for name, x in change.items() if name in NAMES}
    return arrays, case.options | {name: x for name, x in change.items() if name not in NAMES}


NAMES = "q", "k", "v", "pool", "key_mask"

SUMMARY_LAYER: dict[str, Any] = LAYER | {"block": 5, "summaries": 2, "window": 6}


def summary_weights() -> Arrays:
    rng = np.random.default_rng(1)
    dim, heads, kv_heads, size = (LAYER[name] for name in ("dim", "heads", "kv_heads", "head_dim"))
    shapes = {"q.weight": (heads * size, dim), "k.weight": (kv_heads * size, dim), "v.weight": (kv_heads * size, dim)}
    shapes |= {"o.weight": (dim, heads * size)}
    weights = {name: (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32) for name, shape in shapes.items()}
    return weights | {"pool": rng.standard_normal((SUMMARY_LAYER["summaries"], kv_heads, size)).astype(np.float32)}


def summary_layer(weights: Arrays, x: np.ndarray, dout: np.ndarray, dtype: str | None = None) -> Arrays:
    """Return out, dx and every weight's gradient of SummaryAttention.

    They are exact, in float64, or with a ``dtype`` as one device computes them in it.
    """
    working = np.float64 if dtype is None else np.dtype(dtype)
    weights, x, dout = {name: w.astype(working) for name, w in weights.items()}, x.astype(working), dout.astype(working)
    where = np.arange(LENGTH)
    heads = lambda t: t.reshape(BATCH, LENGTH, -1, LAYER["head_dim"])
    flat = lambda t: t.reshape(BATCH, LENGTH, -1)
    q, k, v = (heads(x @ weights[f"{name}.weight"].T) for name in "qkv")
    cotangents = heads(dout @ weights["o.weight"]), np.zeros(q.shape[:3], working)
    asked = SummaryFeatures(*(SUMMARY_LAYER[name] for name in ("block", "window", "summaries")), pool=weights["pool"])
    arrays = (rotate(q, where), rotate(k, where), v, *cotangents, asked)
    inner = exact_summary(*arrays) if dtype is None else plain_summary(*arrays, dtype)
    gradients = {"q": flat(rotate(inner.dq, where, sign=-1)), "k": flat(rotate(inner.dk, where, sign=-1)), "v": flat(inner.dv)}
    attended = flat(inner.out)
    result = {"out": attended @ weights["o.weight"].T, "dx": sum(g @ weights[f"{name}.weight"] for name, g in gradients.items())}
    result |= {f"{name}.weight": np.einsum("bsi,bsj->ij", g, x) for name, g in gradients.items()}
    return result | {"o.weight": np.einsum("bsi,bsj->ij", dout, attended), "pool": inner.dpool}


def check_summary_layer(got: Arrays, weights: Arrays, x: np.ndarray, dout: np.ndarray) -> None:
    """Assert that out, dx and every weight's gradient are as near to float64 as a plain float32 computation."""
    truth, reference = summary_layer(weights, x, dout), summary_layer(weights, x, dout, "float32")
    assert got.keys() == truth.keys()
    for name, mine in got.items():
        error, allowed = relative_error(mine, truth[name]), bound(reference[name], truth[name], "float32")
        assert error <= allowed, f"{name}: error {error:.3g} against float64, allowed {allowed:.3g}"
