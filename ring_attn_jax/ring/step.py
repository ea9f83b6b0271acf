"""The interface of a strategy: the methods of ``Strategy``, which moves keys between ranks, and of ``Step``.

A backward of ``loop.py`` calls ``spread``; for each step of ``circulate`` ``arrived``, ``settle`` and ``send_home``; then
``home`` and ``collect_gradients``. A forward calls ``spread``, for each step ``settle``, then ``collect``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol, TypeVar

import jax

from ring_attn_core.plan.ring import RingPlan

from ..attend.keys import Keys
from ..attend.score import Score
from ..attend.state import BackwardInputs, Gradients

T = TypeVar("T")


class Ring(NamedTuple):
    """A ring of ranks: its plan (layout, mask, sizes and steps), its mesh axis, and the strategy that moves the keys."""

    plan: RingPlan
    axis: str
    strategy: str = "ring"
    """A name in ``STRATEGIES`` of ``strategies/__init__.py``."""


class Step(Protocol):
    """One step of a strategy: the keys to compute on now. The next keys may already be in flight."""

    keys: Keys
    rows: jax.Array
    """For each query run and key run a ``Row`` (``runs.py`` of the core): which of the keys the queries may see.

    An array, int32 [q_runs, k_runs, fields].
    """
    last: bool
    shift: int
    """Number of ranks from the keys' owner to this rank, for the step's name (``plan/step_names.py``); 0 at the first step."""

    def settle(self, state: T) -> T:
        """Return ``state`` after a barrier that delays the next step until ``state`` is computed."""
        ...

    def arrived(self) -> jax.Array | None:
        """Return the gradients that came with ``keys``, summed over the ranks that ``keys`` have visited so far, or None."""
        ...

    def send_home(self, dkv: Gradients) -> None:
        """Send ``dkv`` to the rank that gets ``keys`` next; after the last step, with "direct" after every step, to the owner."""
        ...

    def home(self) -> Gradients:
        """Return the gradients of this rank's own keys, summed over all ranks. Call this after the last step."""
        ...


class Strategy(Protocol):
    """A way to move keys between ranks. By default queries stay on their rank, and all results are of this rank's own arrays."""

    def spread(
        self, queries: tuple[jax.Array, ...], keys: Keys, score: Score, ring: Ring
    ) -> tuple[tuple[jax.Array, ...], Keys, Score]:
        """Return the queries (q, out, lse ... [b s h ...]), keys and score of this rank's steps, moved between ranks."""
        return queries, keys, score

    def circulate(self, keys: Keys, ring: Ring) -> Iterator[Step]:
        """Yield this rank's steps, its own keys first. All ranks take equally many, so a step may have no visible key."""
        ...

    def collect(self, results: tuple[jax.Array, ...], ring: Ring) -> tuple[jax.Array, ...]:
        """Move results [b s h ...] back to the ranks that own their queries: the inverse of ``spread`` for ``queries``."""
        return results

    def collect_gradients(
        self, dq: jax.Array, dkv: Gradients, query: BackwardInputs, ring: Ring
    ) -> tuple[jax.Array, Gradients, jax.Array | None]:
        """Return the gradients of this rank's own q, keys and sinks (None without), from those of what ``spread`` returned."""
        return dq, dkv, query.sinks
