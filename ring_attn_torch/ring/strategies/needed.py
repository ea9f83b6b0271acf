"""The strategy "direct" in a balanced layout: each rank receives all keys that it needs in one exchange, then computes one step.

The plan (``plan/needed.py`` of the core) determines which keys a rank needs. A rank's own and the received keys form the shard of
the step. They are sorted by position, as kernels need them, and padded so that few sizes occur. In the backward the keys travel
again, and their gradients return to the keys' owner, which adds those from ranks ``rank + 1``, ``rank + 2``, ... in this order.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_attn_core.plan.needed import NeededPlan

from ...attend.keys import Keys, bits_of, unpack
from ..groups import Group, rank_in, ranks_of
from ..transfer import Arrays, send_parts


class Places(NamedTuple):
    """Indices, int64 on the device, to select keys to send, to sort keys into the step's shard, and to return their gradients.

    ``sent``: by rank, indices in this rank's shard of the keys sent there. ``sizes``: how many arrive from each rank.
    ``held``: indices of own keys without padding, a slice if it comes last. ``own``, ``received``: the indices in the step's
    shard of ``held`` and of arriving keys, by sending rank. ``capacity``: tokens in the step's shard.
    """

    sent: tuple[Tensor, ...]
    sizes: tuple[int, ...]
    held: slice | Tensor
    own: Tensor
    received: Tensor
    capacity: int


@lru_cache(maxsize=8)  # an entry per batch of documents, some 24 bytes per key that travels, and 8 per own key
def _places(plan: NeededPlan, rank: int, device: torch.device) -> Places:
    by_owner = sorted(plan.places(rank), key=lambda place: (place[1].owner, place[1].start))
    received = _indices((base, each.length) for base, each in by_owner if each.owner != rank)
    runs = sorted((each.first, base, each.length) for base, each in by_owner if each.owner == rank)
    held, own = _indices((first, length) for first, _, length in runs), _indices((base, length) for _, base, length in runs)
    in_front = not len(held) or int(held[-1]) == len(held) - 1
    sent = [_indices((each.first, each.length) for each in plan.sent(rank, reader)) for reader in range(plan.ranks)]
    sizes = tuple(plan.tokens(owner, rank) for owner in range(plan.ranks))
    indices = *sent, own, received, held[:0] if in_front else held
    *sent, own, received, held = torch.cat(indices).to(device).split([*map(len, indices)])
    return Places(tuple(sent), sizes, slice(len(own)) if in_front else held, own, received, plan.capacity(rank))


def _indices(stretches: Iterable[tuple[int, int]]) -> Tensor:
    """Return the indices ``first``, ``first + 1``, ... of each stretch (first, length), int64 [indices]."""
    return torch.cat([torch.zeros(0).long(), *(torch.arange(first, first + length) for first, length in stretches)])


def with_received(own: Keys, plan: NeededPlan, group: Group) -> Keys:
    """Exchange keys with all ranks. Return this rank's ``own`` and the received keys in one padded shard, sorted by position."""
    if not plan.exchanges:
        return own
    places = _places(plan, rank_in(group), own.kv.device)
    index = torch.cat(places.sent)
    key_mask = unpack(own)
    arrays: Arrays = own._replace(bits=None if key_mask is None else key_mask.view(torch.uint8))
    sent: Arrays = tuple([x if x is None else x.transpose(0, 1).index_select(0, index) for x in arrays])
    arriving: Arrays = tuple([x if x is None else x.new_empty((sum(places.sizes), *x.shape[1:])) for x in sent])
    transfer = send_parts(sent, [len(x) for x in places.sent], arriving, places.sizes, group)
    shard: list[Any] = [x if x is None else _place(x, places) for x in arrays]  # while the others arrive
    for x, received in zip(shard, transfer.wait(), strict=True):
        if x is not None:
            x.index_copy_(1, places.received, received.transpose(0, 1))
    keys = Keys(*shard)
    return keys if keys.bits is None else keys._replace(bits=bits_of(keys.bits.bool()))


def _place(own: Tensor, places: Places) -> Tensor:
    """Return a shard for the step with the keys ``own`` [b t ...] at the indices ``places.own``, and 0 elsewhere."""
    shard = own.new_zeros((len(own), places.capacity, *own.shape[2:]))
    return shard.index_copy_(1, places.own, own[:, places.held])


def gradients_home(dkv: Tensor, plan: NeededPlan, group: Group) -> Tensor:
    """Return the gradients of own keys, summed over all ranks in order from this rank on. ``dkv``: of all keys of the step."""
    if not plan.exchanges:
        return dkv
    ranks, rank = ranks_of(group), rank_in(group)
    places = _places(plan, rank, dkv.device)
    sizes = [len(x) for x in places.sent]
    sent = dkv.transpose(0, 1).index_select(0, places.received)
    returned = sent.new_empty((sum(sizes), *sent.shape[1:]))
    transfer = send_parts((sent,), places.sizes, (returned,), sizes, group)
    total = dkv.index_select(1, places.own)
    if len(places.own) < plan.kv_local:
        held, total = total, total.new_zeros(len(total), plan.kv_local, *total.shape[2:])
        total[:, places.held] = held
    transfer.wait()
    parts, by_key = returned.split(sizes), total.transpose(0, 1)
    for shift in range(1, ranks):
        reader = (rank + shift) % ranks
        if sizes[reader]:
            by_key.index_add_(0, places.sent[reader], parts[reader])
    return total
