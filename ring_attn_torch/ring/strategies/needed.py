"""The strategy "direct" in a balanced layout: all keys that a rank needs arrive in one exchange, and are attended to in one step.

The plan (``plan/needed.py`` of the core) determines the keys. They are in transfer while the rank attends to its own keys. Then
they are sorted by position, as kernels need them, in a shard padded to one of few sizes. In the backward the keys travel again,
and their gradients return to the owner, which adds the gradients from ranks ``rank + 1``, ``rank + 2``, ... in this order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_attn_core.plan.needed import NeededPlan, Stretch

from ...attend.keys import Keys, bits_of, unpack
from ...attend.state import Gradients
from ..groups import rank_in, ranks_of
from ..step import Ring, Step, T
from ..transfer import Arrays, send_parts
from .ring import rows


def circulate_needed(keys: Keys, plan: NeededPlan, ring: Ring) -> Iterator[Step]:
    """Yield a step on this rank's own keys, and one on all keys that it receives, if it receives any."""
    if not plan.hops:
        yield NeededStep(keys, ring, None, 0)
        return
    places = _places(plan, rank_in(ring.group), keys.kv.device)
    arriving = ArrivingKeys(keys, places, ring)
    own = NeededStep(keys, ring, places, 0)
    yield own
    arrived = arriving.wait()
    if arrived.kv.shape[1]:
        yield NeededStep(arrived, ring, places, 1, own)
    # Without received keys ``own`` is the last step. Its ``home`` still adds the gradients of the keys that this rank sent.


class Places(NamedTuple):
    """The indices, int64 on the device, by which keys are sent and sorted, and their gradients returned.

    Received keys have two orders. On arrival they are sorted by sending rank. The step computes on a padded shard, in which they
    are sorted by position.

    ``sent``: for each rank the indices, in this rank's shard, of the keys sent to it; empty for this rank. ``sizes``: the number
    of keys that arrive from each rank. ``order``: for each key of the padded shard, its index on arrival; padding has the index
    after the last arrival. ``back``: for each key on arrival, its index in the padded shard.
    """

    sent: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    order: Tensor
    back: Tensor


@lru_cache(maxsize=8)  # an entry per batch of documents, some 24 bytes per key that travels
def _places(plan: NeededPlan, rank: int, device: torch.device) -> Places:
    received = plan.received(rank)
    bases = accumulate((each.length for each in received), initial=0)
    places = sorted(zip([each.owner for each in received], bases, [each.length for each in received], strict=False))
    back = torch.cat([torch.zeros(0).long(), *(torch.arange(base, base + length) for _, base, length in places)])
    order = torch.full((plan.capacity(rank),), len(back))
    order[back] = torch.arange(len(back))
    sent = [_indices(plan.sent(rank, reader)) for reader in range(plan.ranks)]
    sizes = tuple(plan.tokens(owner, rank) for owner in range(plan.ranks))
    on_device = torch.cat([*sent, order, back]).to(device).split([*map(len, sent), len(order), len(back)])
    return Places(on_device[:-2], sizes, *on_device[-2:])


def _indices(stretches: Iterable[Stretch]) -> Tensor:
    """Return the indices of the keys of ``stretches`` in their owner's shard, int64 [keys]."""
    return torch.cat([torch.zeros(0).long(), *(torch.arange(each.first, each.first + each.length) for each in stretches)])


class ArrivingKeys:
    """The keys in transfer: from ``own`` to the ranks that need them, and from other ranks to this rank."""

    def __init__(self, own: Keys, places: Places, ring: Ring) -> None:
        self._order, index = places.order, torch.cat(places.sent)
        arrays = own._replace(bits=_bytes(unpack(own)))
        sent: Arrays = tuple([x if x is None else x.transpose(0, 1).index_select(0, index) for x in arrays])
        # One more row, which stays 0, is the source of the padding.
        arriving: Arrays = tuple([x if x is None else x.new_zeros((sum(places.sizes) + 1, *x.shape[1:])) for x in sent])
        self._transfer = send_parts(sent, [len(x) for x in places.sent], arriving, places.sizes, ring.group)

    def wait(self) -> Keys:
        """Wait for the keys, and return them sorted by position, in a padded shard."""
        arrived: Arrays = self._transfer.wait()
        sort = lambda x: x.index_select(0, self._order).transpose(0, 1).contiguous()
        arrays: list[Any] = [x if x is None else sort(x) for x in arrived]
        shard = Keys(*arrays)
        return shard if shard.bits is None else shard._replace(bits=bits_of(shard.bits.bool()))


def _bytes(key_mask: Tensor | None) -> Tensor | None:
    return None if key_mask is None else key_mask.view(torch.uint8)


class NeededStep:
    """A ``Step`` on this rank's own keys (``shift`` 0), or on all keys that it receives (``shift`` 1).

    ``own``: the step on this rank's own keys, if it precedes this step. ``places``: None if no keys travel.
    """

    def __init__(self, keys: Keys, ring: Ring, places: Places | None, shift: int, own: NeededStep | None = None) -> None:
        self.keys, self.rows, self.shift = keys, rows(ring, shift), shift
        self.last = shift == 1 or places is None or not len(places.order)
        self._ring, self._places, self._own = ring, places, own
        self._dkv: Tensor | None = None

    def settle(self, state: T) -> T:
        """Return ``state`` unchanged: eager execution keeps the order of the steps."""
        return state

    def arrived(self) -> None:
        """Return None: no gradients arrive here, because the keys' owner adds the gradients of all ranks."""

    def send_home(self, dkv: Gradients) -> None:
        """Store the gradients. ``home`` sends them, because the ranks send and receive gradients in one exchange."""
        assert isinstance(dkv, Tensor), "what travels is packed"
        self._dkv = dkv

    def home(self) -> Tensor:
        """Return the gradients of this rank's own keys: its own contribution plus those of rank + 1, rank + 2, ..., in order."""
        assert self._dkv is not None
        own = self if self._own is None else self._own
        assert own._dkv is not None
        if self._places is not None:
            _add_returned(own._dkv, self._dkv if self.shift else own._dkv[:, :0], self._places, self._ring)
        return own._dkv


def _add_returned(total: Tensor, dkv: Tensor, places: Places, ring: Ring) -> None:
    """Send the gradients ``dkv`` of the received keys to their owners, and add the gradients that arrive to ``total``."""
    sizes, ranks, rank = [len(x) for x in places.sent], ranks_of(ring.group), rank_in(ring.group)
    sent = dkv.transpose(0, 1).index_select(0, places.back)
    returned = sent.new_empty((sum(sizes), *sent.shape[1:]))
    send_parts((sent,), places.sizes, (returned,), sizes, ring.group).wait()
    parts, of_keys = returned.split(sizes), total.transpose(0, 1)
    for shift in range(1, ranks):
        reader = (rank + shift) % ranks
        if sizes[reader]:
            of_keys.index_add_(0, places.sent[reader], parts[reader])
