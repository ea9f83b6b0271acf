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

import jax.numpy as jnp
from jax import lax

from ...attend.keys import Keys
from ...attend.state import Gradients
from ..step import Ring, Step, T
from .ring import OneWay, RingStep


class TwoWay(OneWay):
    """The strategy "two_way": keys travel the ring in both directions at once."""

    def circulate(self, keys: Keys, ring: Ring) -> Iterator[Step]:
        """Yield a step for this rank's own keys, then steps that alternate between the keys of the two directions."""
        if not ring.plan.hops:
            yield from super().circulate(keys, ring)
            return
        ways = [Way(keys, shifts, ring) for shifts in ring.plan.ways if shifts]
        step = own = TwoWayStep(keys, None, ring, 0, 0)
        for way in chain.from_iterable(zip_longest(*([way] * way.visits for way in ways))):
            if way is not None:  # else only the other direction has steps left
                step.following = way.step
                yield step
                step = way.next_step()
        step.last, step.parts = True, [own, *(way.step for way in ways)]
        yield step


class Way:
    """The keys that travel in one direction, to ``owner + shift`` for each of the ``shifts``. ``step``: the latest step."""

    def __init__(self, keys: Keys, shifts: tuple[int, ...], ring: Ring) -> None:
        self.visits, self._ring = len(shifts), ring
        self._legs = zip(shifts, (*(b - a for a, b in pairwise(shifts)), 0), strict=True)
        self.step = TwoWayStep(keys, None, ring, 0, shifts[0])  # starts the first transfer

    def next_step(self) -> TwoWayStep:
        """Return the step that computes on the next keys of this direction. Every step but the last sends its keys onward."""
        self.step = TwoWayStep(self.step.next_keys, self.step.travelling, self._ring, *next(self._legs))
        return self.step


class TwoWayStep(RingStep):
    """A ``Step`` on keys that travel in one of the directions, or on this rank's own keys.

    ``parts``, in the last step only: the steps from which ``home`` adds gradients. ``following``: the step whose ``next_keys``
    the next step computes on; None in the last step.
    """

    def __init__(self, keys: Keys, travelling: Gradients | None, ring: Ring, shift: int, hop: int) -> None:
        super().__init__(keys, travelling, ring, shift, hop)
        self.last = False
        self.parts: Sequence[RingStep] = ()
        self.following: TwoWayStep | None = None

    def settle(self, state: T) -> T:
        """Return ``state``, tied by an optimization barrier to the keys of the next step, as in ``RingStep.settle``."""
        if self.following is not None:
            state, self.following.next_keys = lax.optimization_barrier((state, self.following.next_keys))
        return state

    def home(self) -> Gradients:
        """Return the gradients of this rank's own keys: its contribution, plus the sums of the first and second direction."""
        own, *others = (RingStep.home(part) for part in self.parts)
        return reduce(jnp.add, others, own)  # type: ignore[arg-type]
