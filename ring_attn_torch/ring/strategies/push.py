"""The strategy "push": each rank, with the copy engine of its GPU, copies its keys into the memory of the ranks that read them.

A pass differs from a pass of "pull" in how the keys travel (``pull.py`` explains the streams M and S, the flags and the numbers):

    1  M  raises BEGUN = n: its slots for keys and its inbox are empty
    2  S  before step i: waits for a flag of the reader, rank + shifts[i]: BEGUN = n if i <= 3, else KEY_ROOM = (n, i - 3);
          copies the keys into one of the reader's three slots, and raises KEYS = (n, i) there
    3  M  waits for KEYS = (n, i) and computes; then it raises KEY_ROOM = (n, i) at the rank that fills the slot next

The reader neither requests nor copies keys, so "push" suits short shards.
"""

from __future__ import annotations

from ...attend.keys import Keys
from ..peers import BEGUN, KEY_ROOM, KEY_SLOTS, KEYS, copy
from ..step import Ring
from .pull import Pull, PullPass


class Push(Pull):
    """The strategy "push": each rank copies its keys to the ranks that read them."""

    def begin(self, keys: Keys, ring: Ring) -> PullPass:
        """Begin a pass with this rank's keys. Return the pass."""
        return PushPass(keys, ring)


class PushPass(PullPass):
    """A pass in which each rank copies its keys into slots of the ranks that read them."""

    strategy, slots = "push", KEY_SLOTS["push"]

    def publish(self) -> None:
        """Do nothing: ``fetch`` copies the keys from this rank's own arrays, not from its buffer."""

    def fetch(self, i: int) -> None:
        """Start to copy this rank's keys to the reader of step ``i``. Do nothing if the pass has no step ``i``."""
        if i >= len(self.shifts):
            return
        peers, reader, slot = self.peers, self.reader(i), i % self.slots
        with peers.on_side():
            if i > self.slots:
                peers.await_flag(KEY_ROOM, reader, self.value(i - self.slots), side=True)
            else:
                peers.await_flag(BEGUN, reader, self.number, side=True)
            copy(peers.key_slot(reader, slot, self.own), self.own)
            peers.raise_flag(reader, KEYS, slot, self.value(i), side=True)
        for x in self.own:
            if x is not None:
                peers.keep_alive(x)

    def arrived(self, i: int) -> Keys:
        """Let the main stream wait for the keys of step ``i``, and return the slot of this rank's buffer that holds them."""
        self.peers.await_flag(KEYS, i % self.slots, self.value(i))
        return self.peers.key_slot(self.rank, i % self.slots, self.own)

    def release(self, i: int) -> None:
        """Signal to the rank that fills the slot of step ``i`` next, if any, that the step is computed."""
        following = i + self.slots
        if following < len(self.shifts):
            self.peers.raise_flag(self.owner(following), KEY_ROOM, self.rank, self.value(i))
