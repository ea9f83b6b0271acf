"""The strategy "pull": each rank, with the copy engine of its GPU, copies keys straight from the memory of the keys' owner.

A pass, forward or backward, has a number n, equal on all ranks. Its step i computes on the keys of rank - shifts[i]. M is the
main stream of a rank, S its second one. READ, BEGUN etc. are flags; to raise one is to write it on another rank (``peers.py``):

    1  M  waits until all readers of the last pass's keys have raised READ, copies the rank's keys into the rank's buffer, raises
          BEGUN = n at the ranks that read its keys, and at the ranks whose keys it reads
    2  S  before step i: waits for the owner's BEGUN = n, copies the owner's keys into one of two local slots, raises READ = n at
          the owner
    3  M  waits for the copy of step i and computes; when step i is computed, S starts the copy of step i + 2
    4  S  in the backward, after step i: copies the gradients into a slot of their owner's inbox, raises GRADIENTS = (n, i) there
    5  M  in the backward, after step i + 1: waits for GRADIENTS = (n, i), adds the slot to the rank's gradients, raises
          GRADIENT_ROOM = (n, i) at the rank that fills the slot next; before that rank copies, its S waits for this flag

(n, i) is the number n * ranks + i. BEGUN = n also says that the inbox is empty: a rank begins a pass after it has added all
gradients of the previous pass. The owner adds the gradients of its keys in the order of the shifts, the same in each run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...attend.keys import Keys, room_for
from ..groups import rank_in
from ..peers import BEGUN, GRADIENT_ROOM, GRADIENT_SLOTS, GRADIENTS, READ, copy, peers_of
from ..step import Ring, Step
from .direct import OwnerStep
from .ring import OneWay


class Pull(OneWay):
    """The strategy "pull": each rank copies keys from the memory of their owner."""

    def circulate(self, keys: Keys, ring: Ring) -> Iterator[Step]:
        """Yield a step for each shift of the plan, on the keys of ``rank - shift``."""
        if not ring.plan.hops:
            yield from super().circulate(keys, ring)
            return
        run = self.begin(keys, ring)
        for ahead in range(1, run.slots + 1):
            run.fetch(ahead)
        step = PeerStep(keys, None, run, 0)
        for i in range(1, len(run.shifts)):
            yield step
            if i > 1:
                run.release(i - 1)
                run.fetch(i - 1 + run.slots)
            step = PeerStep(run.arrived(i), step, run, i)
        yield step
        run.end()

    def begin(self, keys: Keys, ring: Ring) -> PullPass:
        """Begin a pass with this rank's keys. Return the pass."""
        return PullPass(keys, ring)


class PullPass:
    """A forward or backward pass of this rank. ``slots``: number of slots, each for the keys of a step in transfer or in use."""

    strategy, slots = "pull", 2

    def __init__(self, keys: Keys, ring: Ring) -> None:
        assert ring.group is not None, "a ring of one has no hops"
        wide = torch.promote_types(keys.kv.dtype, torch.float32)
        self.peers = peers_of(ring.group, self.strategy, keys, wide)
        self.peers.begin()
        self.number, self.ring, self.own = self.peers.number, ring, keys
        self.shifts, self.rank, self.ranks = ring.plan.shifts, rank_in(ring.group), ring.plan.ranks
        self.publish()
        self.peers.neighbours = sorted({(self.rank + sign * shift) % self.ranks for shift in self.shifts[1:] for sign in (1, -1)})
        for rank in self.peers.neighbours:
            self.peers.raise_flag(rank, BEGUN, self.rank, self.number)

    def publish(self) -> None:
        """Copy own keys into this rank's buffer, once all ranks have read the previous pass's. Then allocate the local slots."""
        peers = self.peers
        for rank, number in enumerate(peers.read_in):
            if number:
                peers.await_flag(READ, rank, number)
        copy(peers.key_slot(self.rank, 0, self.own), self.own)
        for i in range(1, len(self.shifts)):
            peers.read_in[self.reader(i)] = self.number
        self._local = [room_for(self.own, self.own.kv.shape[1]) for _ in range(self.slots)]
        self._marks: dict[int, Any] = {}

    def fetch(self, i: int) -> None:
        """Start to copy the keys of step ``i`` from their owner. Do nothing if the pass has no step ``i``."""
        if i >= len(self.shifts):
            return
        peers, owner = self.peers, self.owner(i)
        with peers.on_side():
            peers.await_flag(BEGUN, owner, self.number, side=True)
            copy(self._local[i % self.slots], peers.key_slot(owner, 0, self.own))
            peers.raise_flag(owner, READ, self.rank, self.number, side=True)
            self._marks[i] = peers.mark()

    def arrived(self, i: int) -> Keys:
        """Let the main stream wait for the keys of step ``i``, and return them."""
        self.peers.await_mark(self._marks.pop(i))
        return self._local[i % self.slots]

    def release(self, i: int) -> None:
        """Do nothing: no other rank fills this rank's slots. ``PushPass.release`` signals that the slot of step ``i`` is free."""

    def deliver(self, dkv: Tensor, i: int) -> None:
        """Start to copy the gradients of step ``i`` into their owner's inbox."""
        peers, owner, slot = self.peers, self.owner(i), i % GRADIENT_SLOTS
        with peers.on_side():
            if i > GRADIENT_SLOTS:
                peers.await_flag(GRADIENT_ROOM, owner, self.value(i - GRADIENT_SLOTS), side=True)
            else:
                peers.await_flag(BEGUN, owner, self.number, side=True)
            copy([peers.inbox(owner, slot, dkv)], [dkv])
            peers.raise_flag(owner, GRADIENTS, slot, self.value(i), side=True)
        peers.keep_alive(dkv)

    def collect(self, total: Tensor, i: int) -> None:
        """Wait for the gradients of this rank's keys from the reader of step ``i``, and add them to ``total``."""
        peers, slot, following = self.peers, i % GRADIENT_SLOTS, i + GRADIENT_SLOTS
        peers.await_flag(GRADIENTS, slot, self.value(i))
        total += peers.inbox(self.rank, slot, total)
        if following < len(self.shifts):
            peers.raise_flag(self.reader(following), GRADIENT_ROOM, self.rank, self.value(i))

    def end(self) -> None:
        """End the pass. If the main stream does not reach this end within the group's timeout, ``Peers`` ends the process."""
        self.peers.end(f'pass {self.number} of strategy="{self.strategy}"')

    def owner(self, i: int) -> int:
        """Return the rank whose keys this rank has at step ``i``."""
        return (self.rank - self.shifts[i]) % self.ranks

    def reader(self, i: int) -> int:
        """Return the rank that has this rank's keys at step ``i``."""
        return (self.rank + self.shifts[i]) % self.ranks

    def value(self, i: int) -> int:
        """Return n * ranks + i, the value to which step ``i`` of pass n sets its flags, such as GRADIENTS and GRADIENT_ROOM."""
        return self.number * self.ranks + i


class PeerStep(OwnerStep):
    """Step ``i`` of a pass, on the keys of rank ``rank - shifts[i]``."""

    def __init__(self, keys: Keys, before: PeerStep | None, run: PullPass, i: int) -> None:
        super().__init__(keys, before, run.ring, run.shifts[i])
        self._run, self._i = run, i

    def home(self) -> Tensor:
        """Return the gradients of this rank's own keys, summed in step order up to this step. In the last step end the pass."""
        total = super().home()
        if self.last:
            self._run.end()
        return total

    def deliver(self, dkv: Tensor) -> None:
        """Start to copy ``dkv`` into the owner's inbox."""
        self._run.deliver(dkv.contiguous(), self._i)

    def collect(self, total: Tensor) -> None:
        """Add to ``total`` the gradients of this rank's own keys that arrive in its inbox for this step."""
        self._run.collect(total, self._i)
