"""The strategy "ring": one batched send and receive per hop moves the keys, while the rank attends to its current keys.

In the forward k, v, the key mask and the key extents travel (``attend/keys.py``). In the backward they travel again, together
with the gradients of k and v. At the end these gradients arrive at the rank that owns the keys. All arrays of the queries (q,
out, lse, dout, dq) stay on their rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ...attend.keys import Keys
from ...attend.state import Gradients
from ..groups import rank_in
from ..step import Ring, Step, Strategy
from ..transfer import Transfer, send


class OneWay(Strategy):
    def circulate(self, keys: Keys, ring: Ring) -> Iterator[Step]:
        travelling = None
        for shift, hop in zip(ring.plan.shifts, (*ring.plan.hops, 0), strict=True):
            step = RingStep(keys, travelling, ring, shift, hop)
            yield step
            keys, travelling = step.next_keys, step.travelling


class RingStep(Step):
    """A ``Step`` on the keys of ``rank - shift``. The constructor starts to send them to ``rank + hop``, unless ``hop`` is 0."""

    def __init__(self, keys: Keys, travelling: Transfer | None, ring: Ring, shift: int, hop: int) -> None:
        self.keys, self.shift = keys, shift
        self.last = shift == ring.plan.shifts[-1]
        self.rows = ring.plan.rows(rank_in(ring.group), shift)
        self._next = send(keys, hop, ring.group) if hop else None
        self.travelling = travelling
        self._onward = hop or -shift % ring.plan.ranks
        self._group = ring.group

    @property
    def next_keys(self) -> Keys:
        """Wait for the keys of the next step and return them. At the last step return this step's keys."""
        return self.keys if self._next is None else Keys(*self._next.wait())

    def arrived(self) -> Tensor | None:
        """Wait for the gradients of ``keys``, summed over the ranks visited so far, and return them; None at the first step."""
        return None if self.travelling is None else self.travelling.wait()[0]

    def send_home(self, dkv: Gradients) -> None:
        """Send ``dkv`` to the rank that receives ``keys`` next, or in the last step to the rank that owns ``keys``."""
        self.travelling = send((dkv,), self._onward, self._group)

    def home(self) -> Gradients:
        assert self.travelling is not None
        (arrived,) = self.travelling.wait()
        return arrived
