"""The evidence that hypotheses are tried on: one result beside the truth, and parts of it that are cheap to compute anew."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.reference.oracle import exact
from ring_attn_core.reference.tolerance import relative_error

from ..cases import Arrays, Case
from ..measure import first
from ..oracles import Given, Truth, by_name, first_heads
from .dense import Dense

ROWS = 96
"""Queries that a hypothesis about the forward is tried on: the last ones, which see most."""


@dataclass(frozen=True)
class Evidence:
    """What one variant gave, whole arrays in natural order, beside the truth; ``missed``: the names out of bound.

    ``alone``: what it gave on one device, if it ran there too and this is a ring of several.
    """

    case: Case
    plan: RingPlan
    given: Given
    truth: Truth
    got: Arrays
    missed: Collection[str]
    cotangents: Collection[str]
    alone: Arrays | None = None

    def explained(self, name: str, before: float, after: float) -> bool:
        """Whether an error of ``after`` is what is left of ``before`` once its cause is known.

        Half of it at most, for what nearly keeps its bound is within 4 times of it whatever is tried.
        """
        return bool(np.isfinite(after)) and after <= before / 2 and after <= max(4 * self.truth.bounds[name], before / 50)

    def error(self, name: str) -> float:
        return relative_error(first(self.got[name], self.truth.exact[name]), self.truth.exact[name])

    @property
    def rank_of(self) -> np.ndarray:
        """int [s]: the rank that holds each token."""
        ranks = np.zeros(self.plan.length, int)
        for rank in range(self.plan.ranks):
            held = np.array(list(self.plan.positions(rank)))
            ranks[held[held < self.plan.length]] = rank
        return ranks

    @property
    def last_rows(self) -> tuple[Dense, range]:
        rows = range(max(self.case.length - ROWS, 0), self.case.length)
        return Dense(self.case, self.given.arrays, rows, self.case.heads), rows

    def distance(self, out: np.ndarray, rows: range, judged: np.ndarray | None = None) -> float:
        """Return the relative error of what was measured if ``out`` is the truth of these rows, or of the ``judged`` [s]."""
        got = self.got["out"][0, rows.start : rows.stop]
        return relative_error(got, out) if judged is None else relative_error(got[judged], out[judged])

    def error_of_heads(self, name: str, right: np.ndarray) -> float:
        """The relative error of the entries that ``right`` is about: those of batch row 0 and key head 0."""
        return relative_error(first(self.got[name], right), right)

    @property
    def of_heads(self) -> Arrays:
        """Inputs and cotangents of batch row 0 and key head 0, as the oracle takes them."""
        return first_heads(self.case, self.given, self.cotangents)

    def exact(self, arrays: Arrays, lse_counts: float = 1.0) -> Arrays:
        """What is exact of these, where the cotangent of lse counts so many times."""
        arrays = arrays | {"dlse": arrays["dlse"] * lse_counts}
        return by_name(exact(**arrays, mask=self.case.band, **self.case.scalars))


Hypothesis = Callable[[Evidence], str | None]
