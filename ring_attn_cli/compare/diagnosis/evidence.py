"""``Evidence``, on which hypotheses are tested: one result, its truth, and parts of the attention that are cheap to recompute."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.reference.oracle import exact
from ring_attn_core.reference.tolerance import relative_error

from ..cases import Arrays, Case
from ..measure import first
from ..oracles import GlobalArrays, Truth, by_name, first_heads
from .dense import RIGHT, Backward, Dense, Forward

ROWS = 96
"""Number of queries on which most hypotheses about ``out`` are tested: the last ones, or all of a shorter sequence."""


@dataclass(frozen=True)
class Evidence:
    """The result of one variant (``got``) beside the truth, both as global arrays in the natural order of tokens.
    ``missed``: arrays whose error exceeds its bound. ``alone``: the result on one device; None if it did not run there, or if
    ``got`` is that."""

    case: Case
    plan: RingPlan
    inputs: GlobalArrays
    truth: Truth
    got: Arrays
    missed: Collection[str]
    cotangents: Collection[str]
    alone: Arrays | None = None

    def explained(self, name: str, before: float, after: float) -> bool:
        """Return True if a hypothesis explains the error of an array by lowering it from ``before`` to ``after``.
        ``after`` must be at most 4 times the bound or 1/50 of ``before``, and at most half of ``before``: else a hypothesis that
        changes nothing would explain any error slightly above its bound."""
        return bool(np.isfinite(after)) and after <= before / 2 and after <= max(4 * self.truth.bounds[name], before / 50)

    def part(self, name: str, like: np.ndarray, of: Arrays | None = None) -> np.ndarray:
        """Return array ``name`` from ``of``, by default the measured result, in float64 and cut to the shape of ``like``."""
        return first((of or self.got)[name], like).astype(np.float64)

    def pair(self, name: str, of: Arrays | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the array ``name`` twice in float64: from ``of``, by default the measured result, and from the exact result."""
        right = self.truth.exact[name].astype(np.float64)
        return self.part(name, right, of), right

    def error(self, name: str, right: np.ndarray | None = None) -> float:
        """Return the relative error of the measured array ``name`` against ``right``, by default the truth.
        If ``right`` has fewer rows or heads, only the first ones of the measured array count."""
        right = self.truth.exact[name] if right is None else right
        return relative_error(self.part(name, right), right)

    def explains(self, name: str, right: np.ndarray) -> bool:
        return self.explained(name, self.error(name), self.error(name, right))

    @cached_property
    def rank_of(self) -> np.ndarray:
        """Return the owner rank of each token, int [tokens]."""
        ranks = np.zeros(self.plan.length, int)
        for rank in range(self.plan.ranks):
            held = np.array(list(self.plan.positions(rank)))
            ranks[held[held < self.plan.length]] = rank
        return ranks

    @cached_property
    def dense(self) -> Dense:
        """Return attention of the last ``ROWS`` queries, in all heads of batch row 0."""
        rows = range(max(self.case.length - ROWS, 0), self.case.length)
        return Dense(self.case, self.inputs.arrays, rows, self.case.heads)

    @cached_property
    def right(self) -> Forward:
        return self.dense.forward(self.case.factor)

    def out(self, seen: np.ndarray) -> np.ndarray:
        """Return out [queries, heads, v_dim] of the last ``ROWS`` queries under the mask ``seen``, bool [queries, keys]."""
        return self.dense.forward(self.case.factor, seen).out

    @property
    def measured(self) -> np.ndarray:
        """Return the measured out [queries, heads, v_dim] of the last ``ROWS`` queries of batch row 0."""
        return self.got["out"][0, self.dense.rows.start :]

    def explains_out(self, out: np.ndarray, judged: np.ndarray | slice = np.s_[:]) -> bool:
        """Return True if the ``out`` of a hypothesis, of the last ``ROWS`` queries, explains the error at the ``judged`` ones."""
        before, after = (relative_error(self.measured[judged], x[judged]) for x in (self.right.out, out))
        return self.explained("out", before, after)

    def exact(self, lse_counts: float = 1.0) -> Arrays:
        """Return the exact results of batch row 0 and key head 0 for the cotangents dout and ``lse_counts`` * dlse."""
        arrays = first_heads(self.case, self.inputs, self.cotangents)
        arrays |= {"dlse": arrays["dlse"] * lse_counts}
        return by_name(exact(**arrays, mask=self.case.band, **self.case.scalars))

    def parts(self, backward: Backward = RIGHT) -> Arrays:
        """Return the gradients of batch row 0 and key head 0 as summands, one for each rank's tokens: see :meth:`Dense.parts`."""
        dense = Dense(self.case, self.inputs.arrays, range(self.case.length), self.case.heads // self.case.kv_heads)
        dlse = self.inputs.cotangents["lse"][0] * ("lse" in self.cotangents)
        return dense.parts(self.inputs.cotangents["out"][0], dlse, self.rank_of, self.plan.ranks, backward)

    def is_mean_of_values(self, masked: np.ndarray) -> bool:
        """Return True if ``out`` of the ``masked`` queries (bool [n], at least one) of row 0 is, within 5 %, the mean of v."""
        got = self.got["out"][0, : len(masked)][masked]
        mean = self.inputs.arrays["v"][0].astype(np.float64).mean(0).repeat(self.case.heads // self.case.kv_heads, 0)
        return bool(masked.any()) and relative_error(got, np.broadcast_to(mean, got.shape)) < 0.05

    def counted_parts(self, name: str) -> np.ndarray | None:
        """Return [rank, giver]: how many times the gradient on ``rank`` counts what ``giver``'s tokens contribute; 1 is correct.
        It fits :meth:`parts` to batch row 0 and key head 0 by least squares: NaN if a contribution is zero, None if the fit does
        not explain the error."""
        ranks, parts = range(self.plan.ranks), self.parts()[name]
        got = self.got[name][0, :, : parts.shape[2]] if name == "dq" else self.got[name][0, :, 0]
        counts, fitted = np.full((len(ranks), len(ranks)), np.nan), np.zeros_like(got, np.float64)
        for rank in ranks:
            at = self.rank_of == rank
            columns = parts[:, at].reshape(len(ranks), -1)
            alive = [giver for giver in ranks if columns[giver].any()]
            counts[rank, alive] = np.linalg.lstsq(columns[alive].T, got[at].ravel(), rcond=None)[0]
            fitted[at] = (counts[rank, alive] @ columns[alive]).reshape(fitted[at].shape)
        right = parts.sum(0)
        before, after = relative_error(got, right), relative_error(got - fitted + right, right)
        return counts if self.explained(name, before, after) else None


def minimizer(distance: Callable[[float], float], most: float) -> float:
    """Return the minimizer of ``distance`` from ``-most`` to ``most``: the best of 33 points, then a golden-section search."""
    points = np.linspace(-most, most, 33)
    near = int(np.argmin([distance(x) for x in points]))
    low, high = points[max(near - 1, 0)], points[min(near + 1, len(points) - 1)]
    for _ in range(50):
        step = (math.sqrt(5) - 1) / 2 * (high - low)
        low, high = (low, low + step) if distance(high - step) < distance(low + step) else (high - step, high)
    return (low + high) / 2


def nearest(mine: list[np.ndarray], theirs: list[np.ndarray]) -> tuple[list[int], float]:
    """Return the index in ``theirs`` of the array nearest to each array of ``mine``, and the largest distance within a pair."""
    errors = np.array([[relative_error(x, other) for other in theirs] for x in mine])
    return errors.argmin(1).tolist(), errors.min(1).max()


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float((a * b).sum() / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-300))
