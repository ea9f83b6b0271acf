"""The strategy "two_way": keys travel the ring in both directions at once, and reach each rank on the shorter path.

    one way      0 -> 1 -> 2 -> 3 -> 4 -> 5 -> 6 -> 7        seven hops one after the other
    two ways     0 -> 1 -> 2 -> 3 -> 4    and    0 -> 7 -> 6 -> 5    at most four, and both directions of a link are in use

Steps alternate between the two directions, nearest rank first, so a transfer may take as long as two steps. The gradients of keys
travel with them. The last rank of each direction sends its sum of gradients to the keys' owner. To its own contribution the owner
adds the sum from the first direction, and then the sum from the second.
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
    def circulate(self, keys: Keys, ring: Ring) -> Iterator[Step]:
        if not ring.plan.hops:
            yield from super().circulate(keys, ring)
            return
        ways = [Way(keys, shifts, ring) for shifts in ring.plan.ways if shifts]
        step = own = TwoWayStep(keys, None, ring, 0, 0)
        turns = chain.from_iterable(zip_longest(*([way] * way.visits for way in ways)))
        for way in turns:
            if way is not None:
                yield step
                step = way.next_step()
        step.last, step.parts = True, [own, *(way.step for way in ways)]
        yield step


class Way:
    """The keys that travel in one direction, to the ranks ``owner + shift`` for each of ``shifts``. ``step``: the latest step."""

    def __init__(self, keys: Keys, shifts: tuple[int, ...], ring: Ring) -> None:
        self.visits, self._ring = len(shifts), ring
        self._legs = zip(shifts, (*(b - a for a, b in pairwise(shifts)), 0), strict=True)
        self.step = TwoWayStep(keys, None, ring, 0, shifts[0])  # starts the first transfer

    def next_step(self) -> TwoWayStep:
        self.step = TwoWayStep(self.step.next_keys, self.step.travelling, self._ring, *next(self._legs))
        return self.step


class TwoWayStep(RingStep):
    """A ``Step`` on own keys or those of a direction. ``parts``: in the pass's last step, the steps that ``home`` adds up."""

    def __init__(self, keys: Keys, travelling: Transfer | None, ring: Ring, shift: int, hop: int) -> None:
        super().__init__(keys, travelling, ring, shift, hop)
        self.last = False
        self.parts: Sequence[RingStep] = ()

    def home(self) -> Gradients:
        """Return the gradients of own keys, added in this order: own contribution, first direction, second direction, if any."""
        own, *others = (RingStep.home(part) for part in self.parts)
        return reduce(Tensor.add_, others, own)  # type: ignore[arg-type]
