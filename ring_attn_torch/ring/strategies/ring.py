"""The strategy "ring": one batched send and receive per hop moves the keys, while the rank attends to its current keys.

In the forward k, v, the key mask and the key extents travel (``attend/keys.py``). In the backward they travel again, together
with the gradients of k and v. At the end these gradients arrive at the rank that owns the keys. All arrays of the queries (q,
out, lse, dout, dq) stay on their rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ...attend.keys import Keys
from ...attend.score import Score
from ...attend.state import BackwardInputs, Gradients
from ...attend.tiles import Rows
from ..groups import rank_in
from ..step import Ring, Step, T
from ..transfer import Transfer, send


class OneWay:
    """The strategy "ring": queries stay on their rank, keys travel, and in the backward the keys' gradients travel too."""

    def spread(self, queries: tuple[Tensor, ...], keys: Keys, score: Score, ring: Ring) -> tuple[tuple[Tensor, ...], Keys, Score]:
        """Return the arguments unchanged: queries stay on their rank, and ``circulate`` moves the keys."""
        return queries, keys, score

    def circulate(self, keys: Keys, ring: Ring) -> Iterator[Step]:
        """Yield a step for each shift of the plan, with the keys that started on ``rank - shift``."""
        if not ring.plan.hops:
            yield LocalStep(keys, rows(ring, 0))
            return
        hops = (*ring.plan.hops, 0)
        travelling = None
        for shift, hop in zip(ring.plan.shifts, hops, strict=True):
            step = RingStep(keys, travelling, ring, shift, hop)
            yield step
            keys, travelling = step.next_keys, step.travelling

    def collect(self, results: tuple[Tensor, ...], ring: Ring) -> tuple[Tensor, ...]:
        """Return ``results`` unchanged: they are already on the ranks that own their queries."""
        return results

    def collect_gradients(
        self, dq: Tensor, dkv: Gradients, of_q: BackwardInputs, ring: Ring
    ) -> tuple[Tensor, Gradients, Tensor | None]:
        """Return ``dq``, ``dkv`` and ``of_q.sinks`` unchanged: all are gradients of this rank's own arrays."""
        return dq, dkv, of_q.sinks


class LocalStep:
    """The only ``Step`` of a plan without hops: ``circulate`` moves no keys."""

    def __init__(self, keys: Keys, rows: Rows) -> None:
        self.keys, self.rows, self.last, self.shift = keys, rows, True, 0
        self._dkv: Gradients | None = None

    def settle(self, state: T) -> T:
        """Return ``state``, the results of this step, unchanged: no step follows."""
        return state

    def arrived(self) -> None:
        """Return None: no gradients arrive, because no keys travel."""

    def send_home(self, dkv: Gradients) -> None:
        """Store ``dkv`` until ``home`` returns it. Send nothing, because ``keys`` are this rank's own."""
        self._dkv = dkv

    def home(self) -> Gradients:
        """Return the gradients of ``keys``."""
        assert self._dkv is not None
        return self._dkv


class RingStep:
    """A ``Step`` on the keys of ``rank - shift``. The constructor starts to send them to ``rank + hop``, unless ``hop`` is 0."""

    def __init__(self, keys: Keys, travelling: Transfer | None, ring: Ring, shift: int, hop: int) -> None:
        self.keys, self.shift = keys, shift
        self.last = shift == ring.plan.shifts[-1]
        self.rows = rows(ring, shift)
        self._next = send(keys, hop, ring.group) if hop else None
        self.travelling = travelling
        self._onward = hop or -shift % ring.plan.ranks
        self._group = ring.group

    @property
    def next_keys(self) -> Keys:
        """Wait for the keys of the next step and return them. At the last step return this step's keys."""
        return self.keys if self._next is None else Keys(*self._next.wait())

    def settle(self, state: T) -> T:
        """Return ``state``, the results of this step, unchanged: eager execution keeps the order of the steps."""
        return state

    def arrived(self) -> Tensor | None:
        """Wait for the gradients of ``keys``, summed over the ranks visited so far, and return them; None at the first step."""
        return None if self.travelling is None else self.travelling.wait()[0]

    def send_home(self, dkv: Gradients) -> None:
        """Send ``dkv`` to the rank that receives ``keys`` next, or in the last step to the rank that owns ``keys``."""
        self.travelling = send((dkv,), self._onward, self._group)

    def home(self) -> Gradients:
        """Return the gradients of this rank's own keys, summed over all ranks that saw them."""
        assert self.travelling is not None
        (arrived,) = self.travelling.wait()
        return arrived


def rows(ring: Ring, shift: int) -> Rows:
    """Return a ``Row`` [q_runs][k_runs] for each pair of a query run of this rank and a key run of rank - ``shift``."""
    return ring.plan.rows(rank_in(ring.group), shift)
