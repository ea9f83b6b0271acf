"""The interface of a strategy: the methods of ``Strategy``, which moves keys between ranks, and of ``Step``.

A backward of ``loop.py`` calls ``spread``; for each step of ``circulate`` ``arrived``, ``settle`` and ``send_home``; then
``home`` and ``collect_gradients``. A forward calls ``spread``, for each step ``settle``, then ``collect``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor

from ring_attn_core.plan.ring import RingPlan

from ..attend.keys import Keys
from ..attend.score import Score
from ..attend.state import BackwardInputs, Gradients
from ..attend.tiles import Rows
from .groups import Group

T = TypeVar("T")


class Ring(NamedTuple):
    """A ring of ranks: its plan (layout, mask, sizes and steps), its process group, and the strategy that moves the keys."""

    plan: RingPlan
    group: Group
    strategy: str = "ring"
    """A name in ``STRATEGIES`` of ``strategies/__init__.py``."""


class Step(Protocol):
    """One step of a strategy: the keys to compute on now. The next keys may already be in flight."""

    keys: Keys
    rows: Rows
    """For each query run and key run a ``Row`` (``runs.py`` of the core): which of the keys the queries may see.

    A tuple of tuples, [q_runs][k_runs].
    """
    last: bool
    shift: int
    """Number of ranks from the keys' owner to this rank, 0 for its own keys.

    In a balanced layout the strategy "direct" has only one step, with shift 0.
    """

    def settle(self, state: T) -> T:
        """Return ``state``. The next step must not begin before ``state`` is computed, which eager execution ensures."""
        return state

    def arrived(self) -> Tensor | None:
        """Return the gradients that came with ``keys``, summed over the ranks visited so far, or None. None came at the first
        step of a ring or direction, or if each rank sends its gradients straight to the owner."""
        ...

    def send_home(self, dkv: Gradients) -> None:
        """Send ``dkv``, the sum of ``arrived`` and this rank's gradients, to the next rank of ``keys``; after the last step to
        their owner. Some strategies, such as "direct", send this rank's contribution to the owner after every step."""
        ...

    def home(self) -> Gradients:
        """Return the gradients of this rank's own keys, summed over all ranks. Call this after the last step."""
        ...


class Strategy(Protocol):
    """A way to move keys between ranks. By default queries stay on their rank, and all results are of this rank's own arrays."""

    def spread(self, queries: tuple[Tensor, ...], keys: Keys, score: Score, ring: Ring) -> tuple[tuple[Tensor, ...], Keys, Score]:
        """Return the queries (arrays [b s h ...]), keys and score with which this rank computes its steps, moved if necessary."""
        return queries, keys, score

    def circulate(self, keys: Keys, ring: Ring) -> Iterator[Step]:
        """Yield this rank's steps, first the step on its own keys. A step may have no key that this rank sees."""
        ...

    def collect(self, results: tuple[Tensor, ...], ring: Ring) -> tuple[Tensor, ...]:
        """Move results [b s h ...] back to the ranks that own their queries: the inverse of ``spread`` for ``queries``."""
        return results

    def collect_gradients(
        self, dq: Tensor, dkv: Gradients, query: BackwardInputs, ring: Ring
    ) -> tuple[Tensor, Gradients, Tensor | None]:
        """Return the gradients of own q, keys and sinks (None without sinks), from those of what ``spread`` returned."""
        return dq, dkv, query.sinks
