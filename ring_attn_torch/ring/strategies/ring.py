"""Keys go round the ring and their gradients home: one batched send and receive per hop, in flight during the compute.

In the forward k, v and the key mask travel (``attend/keys.py``). In the backward they travel again, and the gradients of k and v
with them, up to the rank that owns them. Whatever belongs to the queries (q, out, lse, dout, dq) stays on its rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ...attend.keys import Keys
from ...attend.state import Gradients
from ...attend.tiles import Rows
from ..groups import rank_in
from ..step import Ring, Step, T
from ..transfer import Transfer, send


def circulate(keys: Keys, ring: Ring) -> Iterator[Step]:
    """Yield a step for every shift of the plan, each with the keys that started on ``rank - shift``."""
    if not ring.plan.hops:
        yield Stay(keys, rows(ring, 0))
        return
    hops = (*ring.plan.hops, 0)
    travelling = None
    for shift, hop in zip(ring.plan.shifts, hops, strict=True):
        step = Hop(keys, travelling, ring, shift, hop)
        yield step
        keys, travelling = step.next_keys, step.travelling


class Stay:
    """The only ``Step`` of a ring whose keys are all where they are needed."""

    def __init__(self, keys: Keys, rows: Rows) -> None:
        self.keys, self.rows, self.last = keys, rows, True
        self._dkv: Gradients | None = None

    def settle(self, state: T) -> T:
        """Return ``state``."""
        return state

    def arrived(self) -> None:
        """Nobody else adds to the gradients."""

    def send_home(self, dkv: Gradients) -> None:
        """They are at home."""
        self._dkv = dkv

    def home(self) -> Gradients:
        """The gradients of this rank's own k/v."""
        assert self._dkv is not None
        return self._dkv


class Hop:
    """A ``Step`` of the ring: the keys that started on ``rank - shift``, which go on to the rank ``hop`` after this one."""

    def __init__(self, keys: Keys, travelling: Transfer | None, ring: Ring, shift: int, hop: int) -> None:
        self.keys = keys
        self.last = shift == ring.plan.shifts[-1]
        self.rows = rows(ring, shift)
        self._next = None if self.last else send(keys, hop, ring.group)
        self.travelling = travelling
        self._onward = ring.plan.home if self.last else hop
        self._group = ring.group

    @property
    def next_keys(self) -> Keys:
        """The keys of the next step, waited for only when the next step asks."""
        return self.keys if self._next is None else Keys(*self._next.wait())

    def settle(self, state: T) -> T:
        """Return ``state``: eager execution is ordered already."""
        return state

    def arrived(self) -> Tensor | None:
        """The gradients of ``keys`` from the ranks that they have passed, waited for; None at the first step."""
        return None if self.travelling is None else self.travelling.wait()[0]

    def send_home(self, dkv: Gradients) -> None:
        """Send on the gradients of ``keys``, what arrived and this rank's part; after the last step, home."""
        self.travelling = send((dkv,), self._onward, self._group)

    def home(self) -> Gradients:
        """The gradients of this rank's own k/v, from every rank that saw them."""
        assert self.last and self.travelling is not None
        (arrived,) = self.travelling.wait()
        return arrived


def rows(ring: Ring, shift: int) -> Rows:
    """[q_runs][k_runs]: what this rank may see at ``shift``."""
    return ring.plan.rows(rank_in(ring.group), shift)
