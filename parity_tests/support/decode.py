"""Random decoding problems: a few queries over a cache with tokens on any rank and in any slot, and the expected results.

A ``Shape`` holds the sizes of a compiled program; a seed draws the values: lengths, tokens by rank, trees. Empty slots hold NaN.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pytest

from ring_attn_core.reference import decode
from ring_attn_core.reference.oracle import rounding
from ring_attn_core.reference.tolerance import bound, relative_error

FEATURES = "tree_mask", "window", "scale", "softcap", "sinks", "alibi_slopes", "fp8"


@dataclass(frozen=True)
class Shape:
    """Sizes, dtype and features; ``slots`` counts those of each rank."""

    ranks: int = 1
    batch: int = 1
    queries: int = 1
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    v_dim: int = 16
    slots: int = 100
    dtype: str = "float32"
    features: tuple[str, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that are not arrays, by their public names."""
        every = {"window": max(1, self.ranks * self.slots // 3), "scale": 0.3, "softcap": 4.0}
        return {name: x for name, x in every.items() if name in self.features}

    def __str__(self) -> str:
        heads, dims = f"{self.heads}/{self.kv_heads}", f"{self.head_dim}-{self.v_dim}"
        return " ".join([f"{self.ranks}x{self.slots}", f"{self.batch}x{self.queries}", heads, dims, self.dtype, *self.features])


@dataclass(frozen=True)
class Problem:
    """The arrays of a shape, by their public names: ``q`` and the replicated arrays, and ``k``, ``v``, ``k_positions``.

    The last three are [ranks, batch, slots, ...]. All floats are float32, rounded to the dtype; float8 values are not scaled yet.
    """

    shape: Shape
    seed: int = 0

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        of, dice = self.shape, np.random.default_rng([self.seed, 5])
        b, n, h, g, slots = of.batch, of.queries, of.heads, of.kv_heads, of.ranks * of.slots
        normal = lambda *shape: dice.normal(size=shape).astype(np.float32)
        in_dtype = lambda x: x if of.dtype == "float64" else rounding(of.dtype)(x)
        in_cache = rounded_to_fp8 if "fp8" in of.features else in_dtype
        q, k, v = in_dtype(normal(b, n, h, of.head_dim)), normal(b, slots, g, of.head_dim), normal(b, slots, g, of.v_dim)
        k, v = in_cache(k), in_cache(v)
        q_positions, k_positions = np.full((b, n), -1, np.int32), np.full((b, slots), -1, np.int32)
        for row in range(b):
            some = dice.choice(of.ranks, dice.integers(1, of.ranks + 1), replace=False)  # slots of the other ranks are empty
            free = dice.permutation(np.flatnonzero(np.isin(np.arange(slots) // max(of.slots, 1), some)))
            if dice.random() < 0.3:
                free.sort()
            length = int(dice.choice([len(free), dice.integers(0, len(free) + 1), min(len(free), 3)]))
            k_positions[row, free[:length]] = np.arange(length)
            newest = length - (0 if "tree_mask" in of.features else dice.integers(0, max(length // 4, 1)))
            positions = np.arange(newest - n, newest)
            q_positions[row] = positions - min(positions[0], 0) if "tree_mask" in of.features else np.maximum(positions, -1)
        k[k_positions < 0], v[k_positions < 0] = np.nan, np.nan
        split = lambda x: np.moveaxis(x.reshape(b, of.ranks, of.slots, *x.shape[2:]), 1, 0)
        q = q.astype(np.float64 if of.dtype == "float64" else np.float32)
        made = {"q": q, "k": split(k), "v": split(v), "q_positions": q_positions, "k_positions": split(k_positions)}
        optional = {
            "tree_mask": lambda: np.stack([random_tree(n, dice) for _ in range(b)]),
            "sinks": lambda: normal(h),
            "alibi_slopes": lambda: dice.random(h).astype(np.float32) / 8,
        }
        made |= {name: make() for name, make in optional.items() if name in of.features}
        if "fp8" in of.features:
            made |= {name: (0.5 + dice.random(g)).astype(np.float32) for name in ("k_scale", "v_scale")}
        return made

    @cached_property
    def _whole(self) -> tuple[list[np.ndarray], dict[str, Any]]:
        """The arguments of the oracle: the slots of all ranks side by side."""
        arrays = self.arrays
        joined = {name: np.concatenate(list(arrays[name]), 1) for name in ("k", "v", "k_positions")}
        first = [arrays["q"], joined["k"], joined["v"], arrays["q_positions"], joined["k_positions"]]
        names = "tree_mask", "sinks", "alibi_slopes", "k_scale", "v_scale"
        return first, {name: arrays[name] for name in names if name in arrays} | self.shape.options

    @cached_property
    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        (q, k, v, q_positions, k_positions), features = self._whole
        return decode.exact(q, k, v, q_positions, k_positions, **features)

    @cached_property
    def by_plain(self) -> tuple[np.ndarray, np.ndarray]:
        """The result of a plain computation in the dtype."""
        (q, k, v, q_positions, k_positions), features = self._whole
        return decode.plain(q, k, v, q_positions, k_positions, self.shape.dtype, **features)

    def check(self, out: np.ndarray, lse: np.ndarray) -> None:
        """Call ``check`` with this problem alone."""
        check([self], [(out, lse)])

    def with_other_unseen(self) -> Problem:
        """Return the same problem with other keys and values in every slot that no query sees."""
        other = replace(self)
        first, features = self._whole
        seen, _ = decode.visible(first[3], first[4], features.get("tree_mask"), features.get("window"))
        unseen = np.moveaxis(~seen.any(1).reshape(self.shape.batch, self.shape.ranks, self.shape.slots), 1, 0)
        arrays = {**self.arrays}
        for name in "kv":
            arrays[name] = np.where(unseen[..., None, None], np.where(np.isnan(arrays[name]), np.inf, 7.0), arrays[name])
            if "fp8" in self.shape.features:
                arrays[name] = np.where(np.isinf(arrays[name]), np.float32(np.nan), arrays[name])
            arrays[name] = arrays[name].astype(np.float32)
        other.__dict__["arrays"] = arrays
        return other


def check(problems: Sequence[Problem], pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
    """Assert that the error against float64 is at most twice that of a plain computation in the dtype, plus rounding.

    The error covers all problems of one shape together, because both errors of a problem with two numbers depend on luck.
    """
    dtype = problems[0].shape.dtype
    for at, name in enumerate(("out", "lse")):
        joined = lambda found, at=at: np.concatenate([np.asarray(pair[at]).ravel() for pair in found])
        shapes = [(pair[at].shape, problem.expected[at].shape) for pair, problem in zip(pairs, problems, strict=True)]
        assert all(got == exact for got, exact in shapes), shapes
        exact, by_plain = joined([problem.expected for problem in problems]), joined([problem.by_plain for problem in problems])
        error, most = relative_error(joined(pairs), exact), bound(by_plain, exact, dtype)
        assert error <= most, f"{name} of {problems[0].shape}: {error:.2e} > {most:.2e}"


def rounded_to_fp8(x: np.ndarray) -> np.ndarray:
    import ml_dtypes

    return x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def random_tree(nodes: int, dice: np.random.Generator) -> np.ndarray:
    """Return a random tree mask, bool [nodes, nodes]: each node sees itself and its ancestors; some nodes are roots."""
    seen = np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        parent = dice.integers(-1, node)
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def random_shape(number: int) -> Shape:
    """Return shape ``number``. Even numbers are float32, which both frameworks compute alike on a CPU."""
    dice = random.Random(number)
    heads, kv_heads = dice.choice([(4, 4), (4, 2), (6, 2), (8, 1), (2, 2), (3, 1)])
    features = tuple(name for name in FEATURES if dice.random() < 0.35)
    return Shape(
        ranks=dice.choice([1, 1, 2, 2, 3, 4, 8]),
        batch=dice.randint(1, 3),
        queries=dice.choice([1, 1, 2, 3, 5, 8]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dice.choice([8, 16, 24, 40]),
        v_dim=dice.choice([8, 16, 33]),
        slots=dice.choice([0, 1, 3, 17, 64, 130, 301, 700]),
        dtype="float32" if number % 2 == 0 else dice.choice(["bfloat16", "bfloat16", "float16", "float64"]),
        features=features,
    )


SHAPES, SEEDS = 12, 5
ALL_SHAPES, ALL_SEEDS = 100, 10
"""60 problems by default, 1,000 with --full."""


def shapes(often: int = SHAPES) -> list[Any]:
    """Return the numbers of shapes as parameters of a test, with the number of seeds of each; only ``often`` run in make test."""
    marks = lambda number: pytest.mark.exhaustive if number >= often else ()
    few = [pytest.param(number, SEEDS, id=str(random_shape(number)), marks=marks(number)) for number in range(SHAPES)]
    full = lambda number: pytest.param(number, ALL_SEEDS, id=f"{number}: {random_shape(number)}", marks=pytest.mark.full)
    return few + [full(number) for number in range(SHAPES, SHAPES + ALL_SHAPES)]
