"""The strategy "gather": one all-gather of each array fetches all keys, and one step computes on them.

The backward gathers the keys again. Each rank receives the gradients of its own keys from all ranks, in at least float32, and
adds them in rank order. Each rank holds the keys of all ranks in memory. In the backward it also holds a gradient for each of
these keys: the contribution of its own queries.
"""

from __future__ import annotations

from functools import lru_cache, reduce

import torch
from torch import Tensor

from ring_attn_core.plan.balanced_layout import BalancedLayout

from ...attend.keys import Keys, along_tokens, join
from ...attend.score import Score
from ...attend.state import BackwardInputs, Gradients
from ..groups import rank_in
from ..step import Ring
from ..transfer import all_gather, exchange
from .ring import OneWay


class GatherKeys(OneWay):
    def spread(self, queries: tuple[Tensor, ...], keys: Keys, score: Score, ring: Ring) -> tuple[tuple[Tensor, ...], Keys, Score]:
        whole = join(Keys(*all_gather(keys, ring.group).wait()), keys.kv.shape[1])
        return queries, keys_in_order(whole, ring), score

    def collect_gradients(
        self, dq: Tensor, dkv: Gradients, query: BackwardInputs, ring: Ring
    ) -> tuple[Tensor, Gradients, Tensor | None]:
        assert isinstance(dkv, Tensor), "what travels is packed"
        (parts,) = exchange((by_rank(by_shard(dkv, ring), ring.plan.ranks),), 0, ring.group).wait()
        return dq, sum_parts(parts), query.sinks


def keys_in_order(keys: Keys, ring: Ring) -> Keys:
    """Sort ``keys``, the joined shards of several ranks, by position if the layout is balanced; else return them unchanged."""
    return along_tokens(lambda x: in_order(x, ring), keys) if isinstance(ring.plan.layout, BalancedLayout) else keys


def in_order(x: Tensor, ring: Ring) -> Tensor:
    """Sort the tokens of ``x``, joined shards [b shards*n ...], by position if the layout is balanced; else return ``x``."""
    order = _order_of(x, ring)
    return x if order is None else x.index_select(1, order[0])


def by_shard(x: Tensor, ring: Ring) -> Tensor:
    """Undo ``in_order``: put the tokens of ``x`` [b shards*n ...] back into the order of the joined shards."""
    order = _order_of(x, ring)
    return x if order is None else x.index_select(1, order[1])


def _order_of(x: Tensor, ring: Ring) -> tuple[Tensor, Tensor] | None:
    layout, shards = ring.plan.layout, ring.plan.k_shards
    return _order(layout, shards, rank_in(ring.group) // shards, x.device) if isinstance(layout, BalancedLayout) else None


@lru_cache(maxsize=8)  # an entry per batch of documents, of 16 bytes per token
def _order(layout: BalancedLayout, shards: int, group: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the indices that sort the ``shards`` joined shards of group ``group`` by position, and the inverse permutation."""
    order = torch.cat([torch.arange(first, first + length) for first, length in layout.stretches(shards)[group]])
    return order.to(device), order.argsort().to(device)


def by_rank(x: Tensor, ranks: int) -> Tensor:
    """Split x [b ranks*n ...] by rank and return it as [ranks b n ...]."""
    return x.unflatten(1, (ranks, x.shape[1] // ranks)).movedim(1, 0)


def sum_parts(parts: Tensor) -> Tensor:
    """Sum ``parts`` [n ...] over n in place, into ``parts[0]``, in index order, because the order determines the last bits."""
    return reduce(Tensor.add_, parts[1:], parts[0])
