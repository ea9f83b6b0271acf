"""The interface of a strategy: the methods of ``Strategy``, which moves keys between ranks, and of ``Step``.

``loop.py`` calls them in this order, in the forward and in the backward:

    spread               before the first step: move queries, keys and score, or return them unchanged
    circulate            yield a ``Step`` for each shard of keys, this rank's own first, while the next one is in transfer
    Step.arrived         in the backward: return the gradients that came with the keys, or None
    Step.settle          return the state; the next step must not begin before the state is computed
    Step.send_home       in the backward: send the keys' gradients on, with this rank's contribution
    Step.home            after the last step of the backward: return the gradients of this rank's own keys
    collect              after the last step of the forward: the inverse of ``spread`` for out, lse and lse's rounding error
    collect_gradients    after the last step of the backward: the inverse of ``spread`` for the gradients

In ``strategies/ring.py`` only the keys travel, so spread and collect do nothing. In ``strategies/ulysses.py`` they move arrays.
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
    """A ring of ranks: its plan, its mesh axis and the strategy by which keys travel."""

    plan: RingPlan
    axis: str
    strategy: str = "ring"
    """A name in ``STRATEGIES`` of ``strategies/__init__.py``."""


class Step(Protocol):
    """One step of a strategy: the keys to compute on now. The next keys may already be in flight."""

    keys: Keys
    rows: jax.Array
    """A ``Row`` for each pair of runs, int32 [q_runs, k_runs, fields]: the part of ``keys`` that this rank may see."""
    last: bool
    shift: int
    """Number of ranks from the keys' owner to this rank, for the step's name (``plan/step_names.py``); 0 at the first step."""

    def settle(self, state: T) -> T:
        """Return ``state``, tied to the next step's keys: the next step cannot begin before ``state`` is computed."""
        ...

    def arrived(self) -> jax.Array | None:
        """Return the gradients of ``keys`` summed over the ranks visited so far.

        Return None at the first step, or if gradients travel straight to the keys' owner, which adds them.
        """
        ...

    def send_home(self, dkv: Gradients) -> None:
        """Send ``dkv`` to the rank that gets ``keys`` next, or to the rank that owns ``keys``.

        ``dkv``: the gradients of ``keys`` that ``arrived`` returned, if any, plus this rank's contribution.
        """
        ...

    def home(self) -> Gradients:
        """Return the gradients of this rank's own keys, summed over all ranks. Call this after the last step."""
        ...


class Strategy(Protocol):
    """A way to move keys between ranks. It may also move queries before the first step, and results after the last step."""

    def spread(
        self, queries: tuple[jax.Array, ...], keys: Keys, score: Score, ring: Ring
    ) -> tuple[tuple[jax.Array, ...], Keys, Score]:
        """Return the queries, keys and score that this rank computes on in the steps of ``ring.plan``.

        ``queries``: q and other arrays [b s h ...] of the queries, such as out and lse.
        """
        ...

    def circulate(self, keys: Keys, ring: Ring) -> Iterator[Step]:
        """Yield this rank's steps, the one on its own keys first.

        All ranks take equally many steps, so this rank may see none of the keys of a step.
        """
        ...

    def collect(self, results: tuple[jax.Array, ...], ring: Ring) -> tuple[jax.Array, ...]:
        """Move results [b s h ...] back to the ranks that own their queries: the inverse of ``spread`` for ``queries``."""
        ...

    def collect_gradients(
        self, dq: jax.Array, dkv: Gradients, of_q: BackwardInputs, ring: Ring
    ) -> tuple[jax.Array, Gradients, jax.Array | None]:
        """Return the gradients of this rank's own q, keys and sinks (None without sinks).

        ``dq``, ``dkv``, ``of_q.sinks``: the gradients of the q, keys and sinks that ``spread`` returned.
        """
        ...
