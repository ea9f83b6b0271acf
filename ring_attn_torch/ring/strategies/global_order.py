"""The strategy of ``order="global"``: all-gathers fetch queries and keys of all ranks, and each rank puts them in global order.

The backward also gathers out, lse and their gradients, and computes the gradients of each rank's own queries and keys there, so
none of them travels. The sinks' gradient, a sum over all queries, is that of rank 0; the other ranks contribute 0.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ring_attn_core.plan.global_order import GlobalPlan, OwnRuns

from ...attend.keys import Keys, along_tokens, clip, join, side_by_side
from ...attend.score import OwnTiles, Score
from ...attend.state import BackwardInputs, Gradients
from ..groups import rank_in
from ..step import Ring
from ..transfer import all_gather
from .ring import OneWay


class GlobalOrder(OneWay):
    """The strategy of ``order="global"``: each rank computes on all tokens in order of position."""

    def spread(self, queries: tuple[Tensor, ...], keys: Keys, score: Score, ring: Ring) -> tuple[tuple[Tensor, ...], Keys, Score]:
        """Return the queries, keys and extents of all ranks by position, and a score that marks this rank's own tokens."""
        q_order, k_order = _tokens(ring, queries[0].device)
        extents = None if score.extents is None else clip(score.extents)
        sent: Any = (*queries, extents, *keys)
        if ring.plan.ranks > 1:
            sent = all_gather(sent, ring.group).wait()
        else:
            sent = tuple([None if x is None else x[None] for x in sent])
        moved: Any = [None if x is None else q_order.sort(side_by_side(x)) for x in sent[: -len(keys)]]
        *spread, extents = moved
        keys = join(Keys(*sent[-len(keys) :]), keys.kv.shape[1])
        keys = keys if k_order.order is None else along_tokens(k_order.sort, keys)
        score = score._replace(extents=extents, own_queries=q_order.own, own_keys=k_order.own)
        return tuple(spread), keys, score._replace(query_tiles=q_order.tiles, key_tiles=k_order.tiles)

    def collect(self, results: tuple[Tensor, ...], ring: Ring) -> tuple[Tensor, ...]:
        """Return the results of this rank's own queries. At padding out is 0 and lse -inf."""
        q_order, _ = _tokens(ring, results[0].device)
        return tuple([q_order.select(x, blank) for x, blank in zip(results, (0.0, -math.inf, 0.0), strict=False)])

    def collect_gradients(
        self, dq: Tensor, dkv: Gradients, query: BackwardInputs, ring: Ring
    ) -> tuple[Tensor, Gradients, Tensor | None]:
        """Return the gradients of this rank's own queries and keys, and on rank 0 that of the sinks, elsewhere 0."""
        assert isinstance(dkv, Tensor), "what travels is packed"
        queries, keys = _tokens(ring, dq.device)
        dsinks = query.sinks if query.sinks is None or rank_in(ring.group) == 0 else torch.zeros_like(query.sinks)
        return queries.select(dq), keys.select(dkv), dsinks


class _Tokens(NamedTuple):
    """``order``: the index in the joined shards of the token at each position, None if it is the position. ``own``: bool, this
    rank's positions. ``places``, ``blank`` [n 1 1]: the position of each token of its shard, and whether it is padding, whose
    place is any. ``tiles``: for kernels."""

    order: Tensor | None
    own: np.ndarray
    places: Tensor
    blank: Tensor
    tiles: OwnTiles | None

    def sort(self, x: Tensor) -> Tensor:
        """Return the tokens of the joined shards ``x`` [b ranks*n ...] by position, without padding."""
        return x if self.order is None else x.index_select(1, self.order)

    def select(self, x: Tensor, blank: float = 0.0) -> Tensor:
        """Return the own tokens of ``x`` [b s h ...] in the order of the shard; padding gets ``blank``."""
        if self.order is None and self.own.all():
            return x
        where = self.blank if x.ndim == 4 else self.blank[..., 0]
        return x.index_select(1, self.places).masked_fill_(where, blank)


def _tokens(ring: Ring, device: torch.device) -> tuple[_Tokens, _Tokens]:
    assert isinstance(ring.plan, GlobalPlan)
    return _tokens_of(ring.plan, rank_in(ring.group), device)


@lru_cache(maxsize=8)  # an entry per plan, of some 50 bytes per token of a shard and 30 per token of the ring
def _tokens_of(plan: GlobalPlan, rank: int, device: torch.device) -> tuple[_Tokens, _Tokens]:
    """Return the indices of the queries and of the keys."""
    found = []
    for places, length, slot, runs in (
        (plan.q_places, plan.length, plan.q_slot, plan.own_queries),
        (plan.k_places, plan.kv_length, plan.k_slot, plan.own_keys),
    ):
        own = np.zeros(slot, bool)
        own[places[rank][places[rank] < length]] = True
        sorts, mine = places.reshape(-1).argsort()[:slot], torch.from_numpy(places[rank]).long()
        order = None if np.array_equal(sorts, np.arange(places.size)) else torch.from_numpy(sorts).to(device)
        blank = (mine >= length)[:, None, None]
        tiles = None if runs is None else own_tiles(runs, rank, slot, device)
        found.append(_Tokens(order, own, mine.clamp(max=slot - 1).to(device), blank.to(device), tiles))
    return found[0], found[1]


def own_tiles(runs: OwnRuns, rank: int, slot: int, device: torch.device) -> OwnTiles:
    """Return the indices of this rank's tiles in arrays of ``slot`` tokens."""
    starts = torch.tensor([start for _, _, start, _ in runs.runs[rank]])
    order = (starts[:, None] + torch.arange(runs.slot)).flatten().clamp(max=slot - 1)
    places = torch.zeros(slot, dtype=torch.int64)
    for base, n, start, _ in runs.runs[rank]:
        places[start : start + n] = torch.arange(base, base + n)
    return OwnTiles(runs.rows[rank], order.to(device), places.to(device))
