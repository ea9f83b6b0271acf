"""The strategy "two_way": keys travel the ring in both directions at once, and reach each rank by the shorter one.

    one way      0 -> 1 -> 2 -> 3 -> 4 -> 5 -> 6 -> 7        seven hops one after the other
    two ways     0 -> 1 -> 2 -> 3 -> 4    and    0 -> 7 -> 6 -> 5    at most four, and both directions of a link are in use

Steps alternate between the two ways, nearest rank first, so a transfer may take as long as two steps. Gradients travel with their
keys and return to the owner from the last rank of each way. The owner adds its own part, then the first way's sum, then the
second's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import chain, pairwise, zip_longest

from torch import Tensor

from ...attend.keys import Keys
from ...attend.state import Gradients
from ..step import Ring, Step
from ..transfer import Transfer
from .ring import OneWay, RingStep


class TwoWay(OneWay):
    """The strategy "two_way"."""

    def circulate(self, keys: Keys, ring: Ring) -> Iterator[Step]:
        """Yield a step for this rank's own keys, and for those that arrive on each way in turn."""
        if not ring.plan.hops:
            yield from super().circulate(keys, ring)
            return
        ways = [Way(keys, shifts, ring) for shifts in ring.plan.ways if shifts]
        step = own = TwoWayStep(keys, None, ring, 0, 0)
        for way in in_turn(ways):
            yield step
            step = way.next_step()
        step.last, step.parts = True, [own, *(way.step for way in ways)]
        yield step


class Way:
    """Keys that travel one way, to the ranks ``shifts`` after their owner. ``step``: the latest visit."""

    def __init__(self, keys: Keys, shifts: tuple[int, ...], ring: Ring) -> None:
        self.visits, self._ring = len(shifts), ring
        self._legs = zip(shifts, (*(b - a for a, b in pairwise(shifts)), 0), strict=True)
        self.step = TwoWayStep(keys, None, ring, 0, shifts[0])  # starts the first transfer

    def next_step(self) -> TwoWayStep:
        """Wait for the next keys, and return the step on them."""
        self.step = TwoWayStep(self.step.next_keys, self.step.travelling, self._ring, *next(self._legs))
        return self.step


class TwoWayStep(RingStep):
    """A ``Step`` of one way. ``parts``: on the last step, the steps that hold the gradients of this rank's own keys."""

    def __init__(self, keys: Keys, travelling: Transfer | None, ring: Ring, shift: int, hop: int) -> None:
        super().__init__(keys, travelling, ring, shift, hop)
        self.last = False
        self.parts: Sequence[RingStep] = ()

    def home(self) -> Gradients:
        """Return the gradients of this rank's own keys, summed in the order of the ways."""
        own, *others = (RingStep.home(part) for part in self.parts)
        return reduce(Tensor.add_, others, own)  # type: ignore[arg-type]


def in_turn(ways: list[Way]) -> Iterator[Way]:
    """Alternate between the ways, yielding each once per visit."""
    turns = chain.from_iterable(zip_longest(*([way] * way.visits for way in ways)))
    return (way for way in turns if way is not None)
