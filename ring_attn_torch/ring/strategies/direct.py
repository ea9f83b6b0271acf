"""The strategy "direct": each rank receives from other ranks only the keys that its queries see, and returns their gradients.

The plan (``plan/direct.py`` of the core) determines the slices of keys that each rank sends at shift s, to rank + s. The
receiving rank places the slices in a shard of zeros. Its queries see no zeros, so ``Step.rows``, which describe the
visible part of the shard, are the same as in the strategy "ring", and any backend can compute the step. During a step the slices
of the next step are in transfer. In the backward the gradients of the previous step are also in transfer, to the keys' owner. The
owner adds the gradients in the order of the shifts. For a balanced layout see ``needed.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from torch import Tensor

from ring_attn_core.plan.direct import DirectPlan
from ring_attn_core.plan.needed import NeededPlan

from ...attend.keys import Keys, cut, place, room_for
from ...attend.score import Score
from ...attend.state import BackwardInputs, Gradients
from ..groups import rank_in
from ..step import Ring, Step
from ..transfer import Transfer, connect, swap
from .needed import gradients_home, with_received
from .ring import OneWay


class Direct(OneWay):
    def spread(self, queries: tuple[Tensor, ...], keys: Keys, score: Score, ring: Ring) -> tuple[tuple[Tensor, ...], Keys, Score]:
        """Return the arguments. In a balanced layout (``NeededPlan``) first receive keys and merge them into ``keys``."""
        return queries, with_received(keys, ring.plan, ring.group) if isinstance(ring.plan, NeededPlan) else keys, score

    def circulate(self, keys: Keys, ring: Ring) -> Iterator[Step]:
        """Yield a step on own keys, then for each shift one on visible keys of ``rank - shift``; if balanced one merged step."""
        if not ring.plan.hops:
            yield from super().circulate(keys, ring)
            return
        connect(ring.group, keys.kv.device)  # because a rank may have nothing to send at the first shift
        step = DirectStep(keys, None, ring, 0)
        for _, shift in pairwise(ring.plan.shifts):
            arriving = Slices(keys, ring, shift)
            yield step
            step = DirectStep(arriving.wait(), step, ring, shift)
        yield step

    def collect_gradients(
        self, dq: Tensor, dkv: Gradients, query: BackwardInputs, ring: Ring
    ) -> tuple[Tensor, Gradients, Tensor | None]:
        if isinstance(ring.plan, NeededPlan):
            assert isinstance(dkv, Tensor), "what travels is packed"
            dkv = gradients_home(dkv, ring.plan, ring.group)
        return dq, dkv, query.sinks


class Slices:
    """The slices of keys that are in transfer at one shift: to rank ``rank + shift``, and from rank ``rank - shift``."""

    def __init__(self, own: Keys, ring: Ring, shift: int) -> None:
        self._own = own
        self._theirs = visible(ring, shift, -shift)
        sent = tuple(x for first, tokens in visible(ring, shift, 0) for x in cut(own, first, tokens))
        self._parts = [room_for(own, tokens) for _, tokens in self._theirs]
        self._transfer = swap(sent, tuple(x for part in self._parts for x in part), shift, ring.group)

    def wait(self) -> Keys:
        """Wait for the received slices. Return a shard of zeros with each slice at the same indices as in the sender's shard."""
        self._transfer.wait()
        return place([(first, part) for (first, _), part in zip(self._theirs, self._parts, strict=True)], self._own)


class OwnerStep(Step):
    """A ``Step`` whose gradients go straight to the keys' owner, which adds them in step order. ``before``: the previous step."""

    def __init__(self, keys: Keys, before: OwnerStep | None, ring: Ring, shift: int) -> None:
        self.keys, self.rows = keys, ring.plan.rows(rank_in(ring.group), shift)
        self.last = shift == ring.plan.shifts[-1]
        self.shift, self._before = shift, before
        self._total: Tensor | None = None

    def arrived(self) -> None:
        """Return None: no sum travels with the keys, because each rank sends its gradients straight to the keys' owner."""

    def send_home(self, dkv: Gradients) -> None:
        """Start to send ``dkv`` to the keys' owner, and add the gradients received in the previous step to those of this rank's
        keys. The first step, on own keys, sends nothing and keeps ``dkv`` as the first summand."""
        assert isinstance(dkv, Tensor), "what travels is packed"
        if self._before is None:
            self._total = dkv
            return
        self.deliver(dkv)
        self._total, self._before = self._before.home(), None

    def home(self) -> Tensor:
        assert self._total is not None
        if self.shift:
            self.collect(self._total)
        return self._total

    def deliver(self, dkv: Tensor) -> None:
        """Start to send ``dkv`` to the owner of the keys."""
        raise NotImplementedError

    def collect(self, total: Tensor) -> None:
        """Add to ``total`` the gradients of this rank's own keys that arrive during this step."""
        raise NotImplementedError


class DirectStep(OwnerStep):
    """A ``Step`` on the visible keys of rank ``rank - shift``. Only the gradients of the received slices travel."""

    def __init__(self, keys: Keys, before: DirectStep | None, ring: Ring, shift: int) -> None:
        super().__init__(keys, before, ring, shift)
        self._ring = ring
        self._returning: Transfer | None = None

    def deliver(self, dkv: Tensor) -> None:
        """Start to return the gradients of received slices to the keys' owner, and to receive those of this rank's own slices."""
        part = lambda first, tokens: dkv[:, first : first + tokens].contiguous()
        sent = tuple(part(*slice_) for slice_ in visible(self._ring, self.shift, -self.shift))
        b, _, *rest = dkv.shape
        arriving = tuple(dkv.new_empty((b, tokens, *rest)) for _, tokens in visible(self._ring, self.shift, 0))
        self._returning = swap(sent, arriving, -self.shift, self._ring.group)

    def collect(self, total: Tensor) -> None:
        assert self._returning is not None
        for part, (first, tokens) in zip(self._returning.wait(), visible(self._ring, self.shift, 0), strict=True):
            total[:, first : first + tokens] += part


def visible(ring: Ring, shift: int, owner: int) -> list[tuple[int, int]]:
    """Return (first token, length) of each nonempty slice that rank ``rank + owner`` sends at ``shift``; ``rank``: this rank."""
    plan, rank = ring.plan, (rank_in(ring.group) + owner) % ring.plan.ranks
    assert isinstance(plan, DirectPlan)
    return [(each.firsts[rank], each.lengths[rank]) for each in plan.slices(shift) if each.lengths[rank]]
