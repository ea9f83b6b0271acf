"""The interface between the loop and a strategy: a ring of ranks, and a step with the keys to compute on."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeVar

import jax

from ring_attn_core.plan.ring import RingPlan

from ..attend.keys import Keys
from ..attend.state import Gradients

T = TypeVar("T")


class Ring(NamedTuple):
    """The ranks that share a sequence: their plan, their mesh axis, and the strategy by which keys travel between them."""

    plan: RingPlan
    axis: str
    strategy: str = "ring"
    """A name in ``strategies.STRATEGIES``."""


class Step(Protocol):
    """One step of a strategy: the keys to compute on now. The next keys may already be in transit."""

    keys: Keys
    rows: jax.Array
    """A ``Row`` for each pair of runs, int32 [q_runs, k_runs, fields]: the part of ``keys`` that this rank may see."""
    last: bool

    def settle(self, state: T) -> T:
        """Return ``state`` once the next step may begin."""
        ...

    def arrived(self) -> jax.Array | None:
        """Return the gradients of ``keys`` from the ranks that they have passed; None at the first step."""
        ...

    def send_home(self, dkv: Gradients) -> None:
        """Send on the gradients of ``keys``: the sum of the received gradients and this rank's part."""
        ...

    def home(self) -> Gradients:
        """Return, after the last step, the gradients of this rank's own keys, summed over the ranks that saw them."""
        ...
