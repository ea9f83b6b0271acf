"""The strategy "two_level": keys travel around an inner ring in each host, while a copy travels to the next host that needs it.

An inner ring sums the gradients of its keys, and returns the sum to the rank at which the keys entered the host. That rank adds
the sum that arrived from the hosts visited before, and sends the total to the next host during the next inner ring. So a transfer
between hosts may take as long as all steps of one host. The sums of the hosts are added in the order in which the keys visit
the hosts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
from jax import lax

from ring_attn_core.plan.two_level import InnerRing, TwoLevelPlan

from ...attend.keys import Keys
from ...attend.state import Gradients
from ..step import Ring, Step, T
from ..transfer import send, send_inside
from .ring import OneWay, RingStep, rows


class TwoLevels(OneWay):
    """The strategy "two_level": keys travel around an inner ring in each host, and a copy travels to the next host meanwhile."""

    def circulate(self, keys: Keys, ring: Ring) -> Iterator[Step]:
        """Yield a step for each shift of each inner ring of the plan."""
        plan = plan_of(ring)
        sums = HostSums(ring)
        for inner_ring in plan.inner_rings:
            sums.keys = sums.cross(keys, inner_ring.crossing)
            if inner_ring.inner[0]:
                keys = send_inside(keys, inner_ring.inner[0], plan.host_ranks, ring.axis, plan.ranks)
            stop = None
            for number in range(len(inner_ring.inner)):
                stop = TwoLevelStep(keys, stop, ring, inner_ring, number, sums)
                yield stop
                keys = stop.next_keys
            assert stop is not None
            sums.left, sums.crossing = stop, inner_ring.crossing or plan.crossing_home
            keys = sums.keys


def plan_of(ring: Ring) -> TwoLevelPlan:
    """Return ``ring.plan``, asserted to be a TwoLevelPlan."""
    assert isinstance(ring.plan, TwoLevelPlan)
    return ring.plan


class HostSums:
    """The gradients of the keys that visit this rank's host, summed over the hosts that these keys have visited.

    ``keys``: the copy that travels to the next host. ``left``: the last step of the previous inner ring, whose gradients ``add``
    has not yet added. ``crossing``: the hosts by which ``add`` sends the sum onward.
    """

    def __init__(self, ring: Ring) -> None:
        self._ranks, self._ring = plan_of(ring).host_ranks, ring
        self._arriving: jax.Array | None = None
        self.keys: Keys | None = None
        self.left: TwoLevelStep | None = None
        self.crossing = 0

    def cross(self, x: T, hosts: int) -> T:
        """Send ``x``, an array or a tree of arrays, ``hosts`` hosts onward, to the rank with the same index in its host."""
        return send(x, hosts * self._ranks, self._ring.axis, self._ring.plan.ranks) if hosts else x

    def add(self) -> None:
        """Add the gradients of ``left`` to the sum, and send the sum onward. Do nothing if ``left`` is None."""
        if self.left is None:
            return
        total = self.left.travelling
        assert total is not None and not isinstance(total, tuple)
        if self._arriving is not None:
            total = self._arriving + total
        self._arriving, self.left = self.cross(total, self.crossing), None

    def home(self) -> jax.Array:
        """Return the gradients of this rank's own keys, summed over all hosts."""
        self.add()
        assert self._arriving is not None
        return self._arriving


class TwoLevelStep(RingStep):
    """A ``Step`` of an inner ring. The constructor sends the keys onward inside the host, except in its last step."""

    def __init__(
        self, keys: Keys, before: TwoLevelStep | None, ring: Ring, inner_ring: InnerRing, number: int, sums: HostSums
    ) -> None:
        plan, inner = plan_of(ring), inner_ring.inner
        inside = partial(send_inside, ranks=plan.host_ranks, axis=ring.axis, members=plan.ranks)
        hop = inner[number + 1] - inner[number] if number + 1 < len(inner) else 0
        self.keys, self.travelling = keys, None if before is None else before.travelling
        self.shift = inner_ring.outer * plan.host_ranks + inner[number]  # of the host's first rank, since this rank is traced
        self.rows = rows(ring, plan.shift(lax.axis_index(ring.axis), inner_ring.outer, inner[number]))
        self.last = not hop and not inner_ring.crossing
        self.next_keys = inside(keys, hop) if hop else keys
        self._stays, self._onward, self._inside = not hop, hop or -inner[number] % plan.host_ranks, inside
        self._sums = sums

    def settle(self, state: T) -> T:
        """Return ``state``, tied by an optimization barrier to the next keys; after an inner ring they come from another host."""
        if not self._stays:
            return super().settle(state)
        if not self.last:
            state, self._sums.keys = lax.optimization_barrier((state, self._sums.keys))
        return state

    def send_home(self, dkv: Gradients) -> None:
        """Send ``dkv`` to the next rank of the inner ring, or in the last step to the rank at which the keys entered the host."""
        self.travelling = self._inside(dkv, self._onward) if self._onward else dkv
        self._sums.add()

    def home(self) -> Gradients:
        return self._sums.home()
