"""The interface between the ring loop and a strategy: the ring, and the steps that a strategy yields."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor

from ring_attn_core.plan.ring import RingPlan

from ..attend.keys import Keys
from ..attend.state import Gradients
from ..attend.tiles import Rows
from .groups import Group

T = TypeVar("T")


class Ring(NamedTuple):
    """A ring of ranks: its plan, its process group and the strategy by which keys travel."""

    plan: RingPlan
    group: Group
    strategy: str = "ring"
    """A name in the table of ``strategies``."""


class Step(Protocol):
    """One step of a strategy: the keys to compute on now. The next keys may already be in flight."""

    keys: Keys
    rows: Rows
    """The rows of ``keys`` that this rank may see, by pairs of runs."""
    last: bool

    def settle(self, state: T) -> T:
        """Return ``state`` once the next step may begin."""
        ...

    def arrived(self) -> Tensor | None:
        """Return the gradients of ``keys`` from the ranks that they have passed, or None at the first rank."""
        ...

    def send_home(self, dkv: Gradients) -> None:
        """Send on the gradients of ``keys``: those that arrived plus this rank's part."""
        ...

    def home(self) -> Gradients:
        """Return the gradients of this rank's own keys, summed over all ranks; call it after the last step."""
        ...
