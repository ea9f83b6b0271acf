"""The problems of all implementations, as data, with their arrays in numpy.

A case holds global arrays in the natural order of tokens; ``shards`` and ``gather`` split them over a ring and join them again.
Padding is NaN, or extents and key masks that hide no key, so that a test fails if padding is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import combinations, product
from typing import Any

import numpy as np

from ring_attn_core import Band, RingPlan, causal, full, sliding_window
from ring_attn_core.dropout import keep_mask
from ring_attn_core.layouts import LAYOUTS, padded_local, slots
from ring_attn_core.plan.balanced_layout import BalancedLayout
from ring_attn_core.problem.strategies import Strategy
from ring_attn_core.reference.oracle import Attention, exact, plain, rounding, visible
from ring_attn_core.reference.tolerance import bound, bound_of_sinks, relative_error

from . import features as draw

MASKS: dict[str, Band] = {"full": full(), "causal": causal(), "window": sliding_window(9)}
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (3, 1)}
LENGTHS = {"even": 48, "odd": 37}
RANKS = (1, 2, 3, 4, 8)
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Case:
    """One problem. ``tiles`` are (block_q, block_k) of the blockwise backend: small ones, so that short sequences have many.

    ``extents``, ``key_extents`` and ``key_mask`` are names in features.py. ``seed`` is the seed of dropout and of the drawn
    features, ``data`` that of the arrays. ``poison``: fully masked queries, their dout and unused keys hold NaN and inf, which
    must change nothing. ``values_in_keys``: v is None, and the values are the first v_dim columns of k. ``own``: arrays in place
    of those drawn, by ``given``; cases that differ in these alone are equal.
    """

    layout: str | BalancedLayout = "zigzag"
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
    extents: str | None = None
    key_mask: str | None = None
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    dropout_rate: float = 0.0
    seed: int = 20240229
    poison: bool = False
    data: int = 0
    key_extents: str | None = None
    strategy: Strategy = "auto"
    values_in_keys: bool = False
    order: str = "ring"
    own: dict[str, np.ndarray] = field(default_factory=dict, compare=False, repr=False)

    def __str__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.compare}
        changed = [f"{name}={value}" for name, value in values.items() if value != getattr(Case, name) or name == "layout"]
        return ",".join(changed)

    @property
    def plan(self) -> RingPlan:
        if isinstance(self.layout, BalancedLayout):
            return RingPlan(self.layout, self.mask, self.ranks, self.layout.seq_local)
        keys = self.length if self.kv_length is None else self.kv_length
        local = [padded_local(self.layout, self.ranks, n) + self.more_slots * slots(self.layout) for n in (self.length, keys)]
        return RingPlan(self.layout, self.mask, self.ranks, local[0], local[1], self.length, keys)

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """q, k, v and the cotangents dout and dlse; values that the dtype holds exactly."""
        rng, data = np.random.default_rng(self.data), np.float64 if self.dtype == "float64" else np.float32
        q, kv = (self.batch, self.length, self.heads), (self.batch, self.plan.kv_length, self.kv_heads)
        shapes = {"q": (*q, self.head_dim), "k": (*kv, self.head_dim), "v": (*kv, self.v_dim), "dout": (*q, self.v_dim)}
        arrays = {name: rounding(self.dtype)(rng.standard_normal(shape).astype(data)) for name, shape in shapes.items()}
        arrays["dlse"] = rng.standard_normal(q).astype(data)
        arrays = {name: self.own.get(name, x) for name, x in arrays.items()}
        return arrays | ({"v": arrays["k"][..., : self.v_dim]} if self.values_in_keys else {})

    @cached_property
    def features(self) -> dict[str, np.ndarray]:
        """The arrays among extents [b s 2], key_mask [b t], sinks [h] and alibi_slopes [h] that the case has."""
        rng, data = np.random.default_rng(abs(self.seed)), np.float64 if self.dtype == "float64" else np.float32
        keys, last_shard = self.plan.kv_length, self._plan_of("k").positions(self.ranks - 1)
        drawn = {}
        if self.extents:
            drawn["extents"] = draw.extents(self.extents, rng, self.batch, self.length, keys)
        if self.key_mask:
            drawn["key_mask"] = draw.key_mask(self.key_mask, rng, self.batch, keys, np.isin(np.arange(keys), last_shard))
        if self.key_extents:
            drawn["key_extents"] = draw.key_extents(self.key_extents, rng, self.batch, keys, self.length)
        if self.sinks:
            drawn["sinks"] = draw.sinks(rng, self.heads).astype(data)
        if self.alibi:
            drawn["alibi_slopes"] = draw.alibi_slopes(rng, self.heads).astype(data)
        return drawn | {name: x for name, x in self.own.items() if name not in self.arrays}

    @property
    def scalars(self) -> dict[str, Any]:
        """The other arguments that ring_attention and the oracle share."""
        seed = self.seed if self.dropout_rate else None
        return {"scale": self.scale, "softcap": self.softcap, "dropout_rate": self.dropout_rate, "dropout_seed": seed}

    @property
    def v_dims(self) -> dict[str, int]:
        """The argument ``v_dim`` of ring_attention, if v is None."""
        return {"v_dim": self.v_dim} if self.values_in_keys else {}

    @cached_property
    def expected(self) -> Attention:
        return self._of_keys(exact(mask=self.mask, **self.arrays, **self.features, **self.scalars), lambda x: x)

    @cached_property
    def plain(self) -> Attention:
        inner = plain(mask=self.mask, dtype=self.dtype, **self.arrays, **self.features, **self.scalars)
        return self._of_keys(inner, rounding(self.dtype))

    def _of_keys(self, of: Attention, rounded: Callable[[np.ndarray], np.ndarray]) -> Attention:
        """Return dk with the gradient of the values added, if these are columns of k, and no dv then."""
        columns = [(0, 0)] * 3 + [(0, self.head_dim - self.v_dim)] if self.values_in_keys else []
        return of._replace(dk=rounded(of.dk + np.pad(of.dv, columns)), dv=None) if columns else of

    @property
    def visible(self) -> np.ndarray:
        """The visible pairs of queries and keys, bool [b s t]."""
        sees = {name: x for name, x in self.features.items() if name in ("extents", "key_extents", "key_mask")}
        seen = visible(self.mask, range(self.length), range(self.plan.kv_length), **sees)
        return np.broadcast_to(seen, (self.batch, *seen.shape[1:]))

    @property
    def poisoned(self) -> dict[str, np.ndarray]:
        """``arrays`` with NaN and inf in every fully masked query, in its dout, and in every unused key and value."""
        arrays, seeing, seen = self.arrays, np.any(self.visible, 2), np.any(self.visible, 1)
        poison = lambda x: np.resize([np.nan, np.inf, -np.inf], x.shape).astype(x.dtype)
        keep = lambda where, x: np.where(where[..., None, None], x, poison(x))
        return arrays | {name: keep(seen if name in "kv" else seeing, arrays[name]) for name in ("q", "k", "v", "dout")}

    def given(self, **arrays: np.ndarray) -> Case:
        """Return the same case with other ``arrays`` or ``features``."""
        return replace(self, own={**self.own, **arrays})

    def with_other_future(self, token: int) -> Case:
        """Return the same case with all tokens from ``token`` on changed."""
        later = lambda x: np.concatenate([x[:, :token], -3 * x[:, token:]], 1)
        return self.given(**{name: later(self.arrays[name]) for name in "qkv"})

    def shards(self, x: np.ndarray, of: str = "q", pad: Any = np.nan) -> list[np.ndarray]:
        """Return every rank's shard of a whole array, padding filled with ``pad``; ``of`` is "q" or "k"."""
        plan = self._plan_of(of)
        missing = (x.shape[0], plan.seq_local * plan.ranks - x.shape[1], *x.shape[2:])
        padded = np.concatenate([x, np.broadcast_to(np.array(pad, x.dtype), missing)], 1)
        return [padded[:, plan.positions(rank)] for rank in range(plan.ranks)]

    def gather(self, shards: Sequence[np.ndarray], of: str = "q") -> np.ndarray:
        """Return the whole array in natural order, padding included, from every rank's shard."""
        plan = self._plan_of(of)
        order = [position for rank in range(plan.ranks) for position in plan.positions(rank)]
        return np.concatenate(shards, 1)[:, np.argsort(order)]

    def inputs(self) -> list[list[np.ndarray]]:
        """Return the shards of q, k, v, dout, dlse and ``features``, in this order: a list for each, with one entry per rank."""
        arrays = self.poisoned if self.poison else self.arrays
        return [self.shards(x, "k" if name in "kv" else "q") for name, x in arrays.items()] + [
            self.shards(x, *PADDING[name]) if name in PADDING else [x] * self.ranks for name, x in self.features.items()
        ]

    def _plan_of(self, of: str) -> RingPlan:
        return self.plan if of == "q" else replace(self.plan, seq_local=self.plan.kv_local, length=self.plan.kv_length)


PADDING: dict[str, tuple[str, Any]] = {
    "extents": ("q", [-(2**30), 2**30]),
    "key_extents": ("k", [-(2**30), 2**30]),
    "key_mask": ("k", True),
}
"""By array: the sequence along which it is sharded ("q" or "k"), and the value of its padding, which must not matter."""


def check(case: Case, got: Attention, allowed_error: Callable[[Case, str], float] | None = None) -> dict[str, float]:
    """Assert that whole arrays, padding included, are right. Return every error as a share of its bound, ``computed_bound``."""
    shares = {}
    for name, mine, truth in zip(Attention._fields, got, case.expected, strict=True):
        assert (mine is None) == (truth is None), f"{name}: {mine}, expected {truth}"
        if mine is None or truth is None:
            continue
        if name != "dsinks":
            length = truth.shape[1]
            np.testing.assert_array_equal(mine[:, length:], -np.inf if name == "lse" else 0, err_msg=f"{name} at padding")
            mine = mine[:, :length]
        error, allowed = relative_error(mine, truth), (allowed_error or computed_bound)(case, name)
        assert error <= allowed, f"{name}: error {error:.3g} against float64, allowed {allowed:.3g} ({case})"
        shares[name] = error / allowed
    return shares


def computed_bound(case: Case, name: str) -> float:
    """Return the bound of the relative error of the array ``name``."""
    if name == "dsinks":
        return bound_of_sinks(case.plain, case.expected, case.arrays | case.features, case.dtype)
    return bound(getattr(case.plain, name), getattr(case.expected, name), case.dtype)


def grid() -> list[Case]:
    """Return {layouts} x {full, causal, window} x ranks x {MHA, GQA, MQA} x {even, odd} x dtypes: 810 cases."""
    axes = product(LAYOUTS, MASKS.values(), RANKS, HEADS.values(), LENGTHS.values(), DTYPES)
    return [Case(layout, mask, ranks, *heads, length=n, dtype=dtype) for layout, mask, ranks, heads, n, dtype in axes]


def pairs(cases: list[Case]) -> list[Case]:
    """Return a small selection of ``cases`` that keeps every pair of values of two fields."""

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

CHOSEN = [Case(), *pairs(grid())]
"""Every pair of values of the grid's axes."""

REST = [case for case in grid() if case not in CHOSEN]

SPECIAL = [
    Case(kv_length=61, mask=full(), ranks=6),
    Case(kv_length=61, mask=causal(offset=61 - 37), v_dim=24),
    Case(length=61, kv_length=20, mask=sliding_window(7, 4, offset=-11), layout="striped", ranks=3),
    Case(layout="contiguous", mask=sliding_window(3), ranks=8, length=61),
    Case(layout="contiguous", mask=sliding_window(3, offset=-30), ranks=4, length=61),
    Case(more_slots=3, ranks=3, layout="striped"),
    Case(more_slots=5, ranks=4),
    Case(length=3, ranks=8, layout="contiguous"),
    Case(length=1, ranks=4),
    Case(head_dim=7, v_dim=3, scale=0.3, ranks=5, layout="striped"),
    Case(scale=-0.3, key_mask="random", alibi=True, dtype="bfloat16"),
    Case(scale=-0.3, key_mask="random", softcap=2.0, alibi=True, dtype="bfloat16"),
    Case(dtype="float64"),
    Case("contiguous", causal(offset=-5), ranks=2, head_dim=1, v_dim=1, heads=1, kv_heads=1, batch=1),
    Case(length=1111, ranks=1, tiles=None, batch=1),
    Case(length=2111, ranks=2, tiles=None, batch=1, heads=2, kv_heads=1),
    Case(head_dim=24, v_dim=16, kv_heads=1, sinks=True, values_in_keys=True),
    Case("striped", ranks=3, head_dim=80, v_dim=50, kv_heads=1, extents="documents", dtype="bfloat16", values_in_keys=True),
    Case("contiguous", full(), 2, head_dim=20, v_dim=20, kv_heads=1, key_mask="random", values_in_keys=True),
]
"""Cases beyond the grid: cross-attention, offsets, shards of padding, odd sizes, negative scales, float64, real tile
sizes, values in keys."""


def one_hot(case: Case) -> Case:
    """Return the same case with scores of 0 and unit vectors as values: out is positive exactly where dropout keeps a pair."""
    q, k, v = (np.zeros_like(case.arrays[name]) for name in "qkv")
    return case.given(q=q, k=k, v=v + np.eye(*v.shape[1::2], dtype=v.dtype)[:, None])


def check_kept(case: Case, out: np.ndarray) -> None:
    """Assert that dropout kept the right set, to the bit, from the out (in natural order) of a ``one_hot`` case."""
    where = range(case.length), range(case.plan.kv_length)
    expected = keep_mask(case.seed, case.dropout_rate, case.batch, case.heads, *where)
    np.testing.assert_array_equal(out[:, : case.length].swapaxes(1, 2) > 0, expected)


def check_same(a: Attention, b: Attention) -> None:
    """Assert that two results are equal to the bit."""
    for name, *pair in zip(Attention._fields, a, b, strict=True):
        np.testing.assert_array_equal(*pair, err_msg=name)


def check_future_unseen(before: Attention, after: Attention, token: int, length: int) -> None:
    """Assert that no bit before ``token`` changed, and that some value from it on did."""
    np.testing.assert_array_equal(before.out[:, :token], after.out[:, :token])
    np.testing.assert_array_equal(before.lse[:, :token], after.lse[:, :token])
    assert (before.out[:, token:length] != after.out[:, token:length]).any()
