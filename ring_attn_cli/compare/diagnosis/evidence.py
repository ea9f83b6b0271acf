"""The evidence that hypotheses are tested on: one result beside the truth, and parts of it that are cheap to recompute."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.reference.oracle import exact
from ring_attn_core.reference.tolerance import relative_error

from ..cases import Arrays, Case
from ..measure import first
from ..oracles import GlobalArrays, Truth, by_name, first_heads
from .dense import Dense

ROWS = 96
"""Number of queries that a hypothesis about the forward is tested on: the last ones, which see most keys."""


@dataclass(frozen=True)
class Evidence:
    """The result of one variant, as global arrays in natural order, beside the truth.

    ``missed``: names of the arrays out of bound. ``alone``: the result on one device, if this ring has several ranks and the
    variant ran there too.
    """

    case: Case
    plan: RingPlan
    given: GlobalArrays
    truth: Truth
    got: Arrays
    missed: Collection[str]
    cotangents: Collection[str]
    alone: Arrays | None = None

    def explained(self, name: str, before: float, after: float) -> bool:
        """Return True if a hypothesis that lowers the error from ``before`` to ``after`` explains it.

        ``after`` must be at most 4 bounds or 1/50 of ``before``. It must also be at most half of ``before``, because an error
        slightly above its bound is within 4 bounds under any hypothesis.
        """
        return bool(np.isfinite(after)) and after <= before / 2 and after <= max(4 * self.truth.bounds[name], before / 50)

    def error(self, name: str) -> float:
        return relative_error(first(self.got[name], self.truth.exact[name]), self.truth.exact[name])

    @property
    def rank_of(self) -> np.ndarray:
        """Return the owner rank of each token, int [s]."""
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
        """Return the relative error of the measured out if ``out`` is the truth of ``rows``, or of those in ``judged`` [s]."""
        got = self.got["out"][0, rows.start : rows.stop]
        return relative_error(got, out) if judged is None else relative_error(got[judged], out[judged])

    def error_of_heads(self, name: str, right: np.ndarray) -> float:
        """Return the relative error of result ``name`` against ``right``, an array of batch row 0 and key head 0 only."""
        return relative_error(first(self.got[name], right), right)

    @property
    def of_heads(self) -> Arrays:
        """Return the inputs and cotangents of batch row 0 and key head 0, under the oracle's argument names."""
        return first_heads(self.case, self.given, self.cotangents)

    def exact(self, arrays: Arrays, lse_counts: float = 1.0) -> Arrays:
        """Return the exact results for ``arrays``, with the cotangent of lse multiplied by ``lse_counts``."""
        arrays = arrays | {"dlse": arrays["dlse"] * lse_counts}
        return by_name(exact(**arrays, mask=self.case.band, **self.case.scalars))


Hypothesis = Callable[[Evidence], str | None]
