"""The strategy "two_level": keys travel around an inner ring in each host, while a copy travels to the next host that needs it.

An inner ring sums the gradients of its keys, and returns the sum to the rank at which the keys entered the host. That rank adds
the sum that arrived from the hosts visited before, and sends the total to the next host during the next inner ring. So a transfer
between hosts may take as long as all steps of one host. The sums of the hosts are added in the order in which the keys visit
the hosts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from torch import Tensor

from ring_attn_core.plan.two_level import InnerRing, TwoLevelPlan

from ...attend.keys import Keys
from ...attend.state import Gradients
from ..groups import rank_in
from ..step import Ring, Step
from ..transfer import Transfer, send
from .ring import OneWay, RingStep


class TwoLevels(OneWay):
    def circulate(self, keys: Keys, ring: Ring) -> Iterator[Step]:
        plan, sums = ring.plan, HostSums(ring)
        assert isinstance(plan, TwoLevelPlan)
        for inner_ring in plan.inner_rings:
            crossing = sums.cross(keys, inner_ring.crossing)
            if inner_ring.inner[0]:
                keys = Keys(*send(keys, inner_ring.inner[0], ring.group, plan.host_ranks).wait())
            stop = None
            for number in range(len(inner_ring.inner)):
                stop = TwoLevelStep(keys, stop, ring, inner_ring, number, sums)
                yield stop
                keys = stop.next_keys
            assert stop is not None
            sums.left, sums.crossing = stop, inner_ring.crossing or plan.crossing_home
            keys = Keys(*crossing.wait())


class HostSums:
    """The gradients of the keys that visit this rank's host, summed over the hosts visited. ``left``: the last step of the
    previous inner ring, not yet added, or None. ``crossing``: the hosts by which ``add`` sends the sum onward."""

    def __init__(self, ring: Ring) -> None:
        assert isinstance(ring.plan, TwoLevelPlan)
        self._ranks, self._group = ring.plan.host_ranks, ring.group
        self._arriving: Transfer | None = None
        self.left: TwoLevelStep | None = None
        self.crossing = 0

    def cross(self, arrays: tuple[Tensor | None, ...], hosts: int) -> Transfer:
        """Start to send ``arrays`` onward by ``hosts`` hosts, to the rank with the same index in its host. 0 sends nothing."""
        return send(arrays, hosts * self._ranks, self._group)

    def add(self) -> None:
        """Add the gradients of ``left`` to the sum, and start to send the sum onward. Do nothing if ``left`` is None."""
        if self.left is None:
            return
        travelling = self.left.travelling
        assert travelling is not None
        (total,) = travelling.wait()
        if self._arriving is not None:
            (before,) = self._arriving.wait()
            total = before.add_(total)
        self._arriving, self.left = self.cross((total,), self.crossing), None

    def home(self) -> Tensor:
        """Return the gradients of this rank's own keys, summed over all hosts."""
        self.add()
        assert self._arriving is not None
        return self._arriving.wait()[0]


class TwoLevelStep(RingStep):
    """A ``Step`` of an inner ring after ``before``. Unless it is the last, the constructor starts to send the keys onward."""

    def __init__(
        self, keys: Keys, before: TwoLevelStep | None, ring: Ring, inner_ring: InnerRing, number: int, sums: HostSums
    ) -> None:
        plan, inner = ring.plan, inner_ring.inner
        assert isinstance(plan, TwoLevelPlan)
        inside = partial(send, ranks=plan.host_ranks, group=ring.group)
        hop = inner[number + 1] - inner[number] if number + 1 < len(inner) else 0
        self.keys, self.travelling = keys, None if before is None else before.travelling
        self.shift = plan.shift(rank_in(ring.group), inner_ring.outer, inner[number])
        self.rows = plan.rows(rank_in(ring.group), self.shift)
        self.last = not hop and not inner_ring.crossing
        self._next = inside(keys, hop) if hop else None
        self._onward, self._inside, self._sums = hop or -inner[number] % plan.host_ranks, inside, sums

    def send_home(self, dkv: Gradients) -> None:
        """Send ``dkv`` to the next rank of the inner ring, in the last step to the rank at which the keys entered the host. The
        first step of later inner rings also adds the previous one's gradients to the sum over hosts, and sends it onward."""
        self.travelling = self._inside((dkv,), self._onward)
        self._sums.add()

    def home(self) -> Gradients:
        return self._sums.home()
