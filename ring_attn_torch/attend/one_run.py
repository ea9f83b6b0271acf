"""The rows, keys and score of a step in a balanced layout, converted so that each shard is one run, as the kernels take it.

A rank's token positions ascend, so the key positions [first, end) that a query sees are one interval of local key indices:

    [max(first, q_pos - hi), min(end, q_pos - lo + 1)) -> [index of its first key in the shard, index after its last key)

The converted extents hold the mask and the documents. Key extents are converted alike to local indices of the queries.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ring_attn_core.kernels.call import BEYOND
from ring_attn_core.runs import Band, Row

from .keys import Keys, clipped
from .score import Score
from .tiles import Rows

Runs = tuple[tuple[int, ...], ...]
"""The (base, length, start) of each run of a shard."""


def as_one_run(rows: Rows, keys: Keys, score: Score, queries: int, band: Band) -> tuple[Rows, Keys, Score]:
    """Return the single row of a step in which both shards are one run, and keys and score with extents in local indices.

    ``queries``: tokens of the query shard, padding included. ``band``: the mask, in positions.
    """
    q_runs, k_runs = tuple([pairs[0][2:5] for pairs in rows]), tuple([pair[5:8] for pair in rows[0]])
    batch, tokens, device = len(keys.kv), keys.kv.shape[1], keys.kv.device
    least, most = _limits(q_runs, queries, band, device)
    if score.extents is None:
        extents = torch.stack([least[:, 0], most[:, 1]], -1).expand(batch, -1, -1)
    else:
        extents = clipped(score.extents).clamp(least, most)
    extents = _local(_positions(k_runs, tokens, device), extents)
    of_keys = None if keys.extents is None else _local(_positions(q_runs, queries, device), keys.extents)
    one = Row(-tokens, queries, 0, sum(run[1] for run in q_runs), 0, 0, sum(run[1] for run in k_runs), 0, 1, 0)
    return ((one,),), keys._replace(extents=of_keys), score._replace(extents=extents)


def _local(positions: Tensor, intervals: Tensor) -> Tensor:
    """Convert intervals of token positions to intervals of indices in the ascending ``positions``."""
    return torch.searchsorted(positions, intervals.contiguous(), out_int32=True)


@lru_cache(maxsize=64)  # an entry per rank and layout, 4 bytes per token on the device: packed batches have new layouts
def _positions(runs: Runs, tokens: int, device: torch.device) -> Tensor:
    """Return the position of each token of a shard, int32 [tokens]; that of padding is ``BEYOND``."""
    held = [torch.arange(start, start + length) for _, length, start in runs]
    padding = torch.full((tokens - sum(map(len, held)),), BEYOND)
    return torch.cat([*held, padding]).int().to(device)


@lru_cache(maxsize=8)  # an entry per mask and layout, 16 bytes per query on the device
def _limits(runs: Runs, tokens: int, band: Band, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the bounds (least, most), int32 [s 2] each, to which ``band`` clamps each query's extent (first, end)."""
    at = _positions(runs, tokens, torch.device("cpu")).long()
    first = torch.zeros_like(at) if band.hi is None else at - band.hi
    end = torch.full_like(at, BEYOND) if band.lo is None else at - band.lo + 1
    least, most = torch.stack([first, torch.zeros_like(at)], -1), torch.stack([torch.full_like(at, BEYOND), end], -1)
    return least.clamp(0, BEYOND).int().to(device), most.clamp(0, BEYOND).int().to(device)
