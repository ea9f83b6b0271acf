"""The problems that every implementation is tried on, as data, with their arrays in numpy.

A case holds whole arrays in the natural order of tokens; ``shards`` and ``gather`` go to a ring and back. Padding is filled with
NaN on the way in, so that whoever reads it is found out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import combinations, product
from typing import Any

import numpy as np

from ring_attn_core import Band, RingPlan, causal, full, sliding_window
from ring_attn_core.layouts import LAYOUTS, padded_local, slots
from ring_attn_core.oracle import Attention, exact, plain, rounding
from ring_attn_core.tolerance import bound, relative_error

MASKS: dict[str, Band] = {"full": full(), "causal": causal(), "window": sliding_window(9)}
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (3, 1)}
LENGTHS = {"even": 48, "odd": 37}
RANKS = (1, 2, 3, 4, 8)
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Case:
    """One problem. ``tiles`` are (block_q, block_k) of the blockwise backend: small ones, so that short sequences have many."""

    layout: str = "zigzag"
    mask: Band = MASKS["causal"]
    ranks: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    v_dim: int = 16
    length: int = 37
    kv_length: int | None = None
    dtype: str = "float32"
    batch: int = 2
    more_slots: int = 0
    tiles: tuple[int, int] | None = (4, 3)
    scale: float | None = None

    def __str__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        changed = [f"{name}={value}" for name, value in values.items() if value != getattr(Case, name) or name == "layout"]
        return ",".join(changed)

    @property
    def plan(self) -> RingPlan:
        keys = self.length if self.kv_length is None else self.kv_length
        local = [padded_local(self.layout, self.ranks, n) + self.more_slots * slots(self.layout) for n in (self.length, keys)]
        return RingPlan(self.layout, self.mask, self.ranks, local[0], local[1], self.length, keys)

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """q, k, v and the cotangents dout and dlse; values that the dtype holds exactly."""
        rng = np.random.default_rng(0)
        keys = self.plan.kv_length
        q = (self.batch, self.length, self.heads)
        kv = (self.batch, keys, self.kv_heads)
        shapes = {"q": (*q, self.head_dim), "k": (*kv, self.head_dim), "v": (*kv, self.v_dim), "dout": (*q, self.v_dim)}
        data = np.float64 if self.dtype == "float64" else np.float32
        arrays = {name: rounding(self.dtype)(rng.standard_normal(shape).astype(data)) for name, shape in shapes.items()}
        return arrays | {"dlse": rng.standard_normal(q).astype(data)}

    @cached_property
    def expected(self) -> Attention:
        return exact(mask=self.mask, scale=self.scale, **self.arrays)

    @cached_property
    def plain(self) -> Attention:
        return plain(mask=self.mask, scale=self.scale, dtype=self.dtype, **self.arrays)

    def with_other_future(self, token: int) -> Case:
        """The same case with everything from ``token`` on changed."""
        other = replace(self)
        for name in "qkv":
            other.arrays[name][:, token:] *= -3
        return other

    def shards(self, x: np.ndarray, of: str = "q") -> list[np.ndarray]:
        """Every rank's shard of a whole array, padding filled with NaN; ``of`` is "q" or "k"."""
        plan = self._plan_of(of)
        held = plan.seq_local * plan.ranks
        padded = np.concatenate([x, np.full((x.shape[0], held - x.shape[1], *x.shape[2:]), np.nan, x.dtype)], 1)
        return [padded[:, plan.positions(rank)] for rank in range(plan.ranks)]

    def gather(self, shards: Sequence[np.ndarray], of: str = "q") -> np.ndarray:
        """The whole array in natural order, padding included, from every rank's shard."""
        plan = self._plan_of(of)
        order = [position for rank in range(plan.ranks) for position in plan.positions(rank)]
        return np.concatenate(shards, 1)[:, np.argsort(order)]

    def inputs(self) -> list[list[np.ndarray]]:
        """The shards of q, k, v, dout and dlse: five lists, one entry a rank."""
        return [self.shards(x, "k" if name in "kv" else "q") for name, x in self.arrays.items()]

    def _plan_of(self, of: str) -> RingPlan:
        return self.plan if of == "q" else replace(self.plan, seq_local=self.plan.kv_local, length=self.plan.kv_length)


def check(case: Case, got: Attention) -> dict[str, float]:
    """Assert that whole arrays, padding included, are right; returns every error as a share of its bound."""
    shares = {}
    for name, mine, truth, reference in zip(Attention._fields, got, case.expected, case.plain, strict=True):
        length = truth.shape[1]
        np.testing.assert_array_equal(mine[:, length:], -np.inf if name == "lse" else 0, err_msg=f"{name} at padding")
        error, allowed = relative_error(mine[:, :length], truth), bound(reference, truth, case.dtype)
        if not error <= allowed:
            raise AssertionError(f"{name}: error {error:.3g} against float64, allowed {allowed:.3g} ({case})")
        shares[name] = error / allowed
    return shares


def grid() -> list[Case]:
    """{layouts} x {full, causal, window} x ranks x {MHA, GQA, MQA} x {even, odd} x dtypes: 810 cases."""
    axes = product(LAYOUTS, MASKS.values(), RANKS, HEADS.values(), LENGTHS.values(), DTYPES)
    return [Case(layout, mask, ranks, *heads, length=n, dtype=dtype) for layout, mask, ranks, heads, n, dtype in axes]


def pairs(cases: list[Case]) -> list[Case]:
    """A small selection in which every pair of values of two fields that occurs in ``cases`` still occurs."""

    def covered(case: Case) -> set[tuple[Any, ...]]:
        values = {**vars(case), "heads": (case.heads, case.kv_heads)}
        return {(a, values[a], b, values[b]) for a, b in combinations(_VARIED, 2)}

    missing = set().union(*map(covered, cases))
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(covered(case) & missing))
        chosen.append(best)
        missing -= covered(best)
    return chosen


_VARIED = ("layout", "mask", "ranks", "heads", "length", "dtype")

SPECIAL = [
    Case(kv_length=61, mask=full()),
    Case(kv_length=61, mask=causal(offset=61 - 37), v_dim=24),
    Case(length=61, kv_length=20, mask=sliding_window(7, 4, offset=-11), layout="striped", ranks=3),
    Case(layout="contiguous", mask=sliding_window(3), ranks=8, length=61),
    Case(layout="contiguous", mask=sliding_window(3, offset=-30), ranks=4, length=61),
    Case(more_slots=3, ranks=3, layout="striped"),
    Case(more_slots=5, ranks=4),
    Case(length=3, ranks=8, layout="contiguous"),
    Case(length=1, ranks=4),
    Case(head_dim=7, v_dim=3, scale=0.3),
    Case(head_dim=1, v_dim=1, heads=1, kv_heads=1, batch=1),
    Case(dtype="float64"),
    Case(mask=causal(offset=-5), ranks=2, layout="contiguous"),
    Case(ranks=5, layout="striped"),
    Case(ranks=6),
    Case(length=1111, ranks=1, tiles=None, batch=1),
    Case(length=2111, ranks=2, tiles=None, batch=1, heads=2, kv_heads=1),
]
"""What the grid does not vary: cross-attention, offsets, shards that are all padding, odd sizes, float64, the real tile sizes."""


def check_future_unseen(before: Attention, after: Attention, token: int, length: int) -> None:
    """Assert that nothing before ``token`` changed to the bit, and that something from it on did."""
    np.testing.assert_array_equal(before.out[:, :token], after.out[:, :token])
    np.testing.assert_array_equal(before.lse[:, :token], after.lse[:, :token])
    assert (before.out[:, token:length] != after.out[:, token:length]).any()
