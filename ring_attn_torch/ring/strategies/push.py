"""The strategy "push": each rank, with the copy engine of its GPU, copies its keys into the memory of the ranks that read them.

A pass, forward or backward, has a number n, equal on all ranks. Its step i computes on the keys of rank - shifts[i]. M is the
main stream of a rank, S its second one. BEGUN, KEYS etc. are flags; to raise one is to write it on another rank (``peers.py``):

    1  M  raises BEGUN = n at the ranks that read its keys, and at those whose keys it reads: its slots and inbox are empty
    2  S  before step i: waits for a flag of the reader, rank + shifts[i]: BEGUN = n if i <= 3, else KEY_ROOM = (n, i - 3);
          copies the keys into one of the reader's three slots, and raises KEYS = (n, i) there
    3  M  waits for KEYS = (n, i) and computes; then it raises KEY_ROOM = (n, i) at the rank that fills the slot next
    4  S  in the backward, after step i: copies the gradients into a slot of their owner's inbox, raises GRADIENTS = (n, i) there
    5  M  in the backward, after step i + 1: waits for GRADIENTS = (n, i), adds the slot to the rank's gradients, raises
          GRADIENT_ROOM = (n, i) at the rank that fills the slot next; before that rank copies, its S waits for this flag

(n, i) is the number n * ranks + i. A rank begins a pass after it has added all gradients of the previous pass. The owner adds the
gradients of its keys in the order of the shifts, the same in each run.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...attend.keys import Keys
from ..groups import rank_in
from ..peers import BEGUN, GRADIENT_ROOM, GRADIENT_SLOTS, GRADIENTS, KEY_ROOM, KEY_SLOTS, KEYS, copy, peers_of
from ..step import Ring, Step
from .direct import OwnerStep
from .ring import OneWay


class Push(OneWay):
    def circulate(self, keys: Keys, ring: Ring) -> Iterator[Step]:
        if not ring.plan.hops:
            yield from super().circulate(keys, ring)
            return
        run = PushPass(keys, ring)
        for ahead in range(1, KEY_SLOTS + 1):
            run.send(ahead)
        step = PushStep(keys, None, run, 0)
        for i in range(1, len(run.shifts)):
            yield step
            if i > 1:
                run.release(i - 1)
                run.send(i - 1 + KEY_SLOTS)
            step = PushStep(run.arrived(i), step, run, i)
        yield step
        run.end()


class PushPass:
    def __init__(self, keys: Keys, ring: Ring) -> None:
        assert ring.group is not None, "a ring of one has no hops"
        self.peers = peers_of(ring.group, keys, torch.promote_types(keys.kv.dtype, torch.float32))
        self.peers.begin()
        self.number, self.ring, self.own = self.peers.number, ring, keys
        self.shifts, self.rank, self.ranks = ring.plan.shifts, rank_in(ring.group), ring.plan.ranks
        self.peers.neighbours = sorted({(self.rank + sign * shift) % self.ranks for shift in self.shifts[1:] for sign in (1, -1)})
        for rank in self.peers.neighbours:
            self.peers.raise_flag(rank, BEGUN, self.rank, self.number)

    def send(self, i: int) -> None:
        """Start to copy this rank's keys to the reader of step ``i``. Do nothing if the pass has no step ``i``."""
        if i >= len(self.shifts):
            return
        peers, reader, slot = self.peers, self.reader(i), i % KEY_SLOTS
        with peers.on_side():
            if i > KEY_SLOTS:
                peers.await_flag(KEY_ROOM, reader, self.value(i - KEY_SLOTS), side=True)
            else:
                peers.await_flag(BEGUN, reader, self.number, side=True)
            copy(peers.key_slot(reader, slot, self.own), self.own)
            peers.raise_flag(reader, KEYS, slot, self.value(i), side=True)
        for x in self.own:
            if x is not None:
                peers.keep_alive(x)

    def arrived(self, i: int) -> Keys:
        """Let the main stream wait for the keys of step ``i``, and return the slot of this rank's buffer that holds them."""
        self.peers.await_flag(KEYS, i % KEY_SLOTS, self.value(i))
        return self.peers.key_slot(self.rank, i % KEY_SLOTS, self.own)

    def release(self, i: int) -> None:
        """Signal to the rank that fills the slot of step ``i`` next, if any, that the step is computed."""
        following = i + KEY_SLOTS
        if following < len(self.shifts):
            self.peers.raise_flag(self.owner(following), KEY_ROOM, self.rank, self.value(i))

    def end(self) -> None:
        self.peers.end(f'pass {self.number} of strategy="push"')

    def owner(self, i: int) -> int:
        """Return the rank whose keys this rank has at step ``i``."""
        return (self.rank - self.shifts[i]) % self.ranks

    def reader(self, i: int) -> int:
        """Return the rank that has this rank's keys at step ``i``."""
        return (self.rank + self.shifts[i]) % self.ranks

    def value(self, i: int) -> int:
        return self.number * self.ranks + i


class PushStep(OwnerStep):
    """Step ``i`` of a pass, on the keys of rank ``rank - shifts[i]``."""

    def __init__(self, keys: Keys, before: PushStep | None, run: PushPass, i: int) -> None:
        super().__init__(keys, before, run.ring, run.shifts[i])
        self._run, self._i = run, i

    def home(self) -> Tensor:
        """Return the gradients of this rank's own keys, summed in step order up to this step. In the last step end the pass."""
        total = super().home()
        if self.last:
            self._run.end()
        return total

    def deliver(self, dkv: Tensor) -> None:
        run, i, dkv = self._run, self._i, dkv.contiguous()
        peers, owner, slot = run.peers, run.owner(i), i % GRADIENT_SLOTS
        with peers.on_side():
            if i > GRADIENT_SLOTS:
                peers.await_flag(GRADIENT_ROOM, owner, run.value(i - GRADIENT_SLOTS), side=True)
            else:
                peers.await_flag(BEGUN, owner, run.number, side=True)
            copy([peers.inbox(owner, slot, dkv)], [dkv])
            peers.raise_flag(owner, GRADIENTS, slot, run.value(i), side=True)
        peers.keep_alive(dkv)

    def collect(self, total: Tensor) -> None:
        run, i = self._run, self._i
        slot, following = i % GRADIENT_SLOTS, i + GRADIENT_SLOTS
        run.peers.await_flag(GRADIENTS, slot, run.value(i))
        total += run.peers.inbox(run.rank, slot, total)
        if following < len(run.shifts):
            run.peers.raise_flag(run.reader(following), GRADIENT_ROOM, run.rank, run.value(i))
