"""The contract between the loop and a strategy: who circulates the keys, and what a step of it offers."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeVar

import jax

from ring_attn_core.plan.ring import RingPlan

from ..attend.keys import Keys
from ..attend.state import Gradients

T = TypeVar("T")


class Ring(NamedTuple):
    """The ranks that share a sequence: what each of them holds and sees, where they are, and how keys travel between them."""

    plan: RingPlan
    axis: str
    strategy: str = "ring"
    """A name in the table of ``strategies``."""


class Step(Protocol):
    """One step of a strategy: the keys to compute on now. The next ones may already be on their way."""

    keys: Keys
    rows: jax.Array
    """What this rank may see of them, by pairs of runs."""
    last: bool

    def settle(self, state: T) -> T:
        """Return ``state`` once the next step may begin."""
        ...

    def arrived(self) -> jax.Array | None:
        """Return the gradients of ``keys`` from the ranks that they have passed; None where there are none yet."""
        ...

    def send_home(self, dkv: Gradients) -> None:
        """Send on the gradients of ``keys``: what arrived and this rank's part."""
        ...

    def home(self) -> Gradients:
        """Return, after the last step, the gradients of this rank's own keys from every rank that saw them."""
        ...
