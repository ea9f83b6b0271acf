"""The rows (``runs.Row``), keys and score of a step in a balanced layout, converted so that each shard is one run.

Kernels require one run per shard. A run is an arithmetic progression of positions. A query at ``q_pos`` sees the keys of its
extent [first, end) that the mask ``lo <= q_pos - k_pos <= hi`` allows. The positions in a shard ascend, so these keys are
neighbours in the shard. Their interval of positions is converted to an interval of indices:

    [max(first, q_pos - hi), min(end, q_pos - lo + 1)) -> [index of the first such key, index after the last such key)

The new extents thus express the mask too. Key extents become intervals of local query indices, and do not express the mask.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ring_attn_core.kernels.call import BEYOND
from ring_attn_core.runs import Band, Row

from .keys import Keys, clip
from .recent import Unchanged, reusable, stream_of
from .score import Score
from .tiles import Rows

Runs = tuple[tuple[int, ...], ...]
"""(base, length, start) of each run of a shard: its first token's index in the shard, its length, its first token's position."""


class StepShards(NamedTuple):
    """The runs and sizes of a step's shards. ``queries``, ``keys``: numbers of tokens, padding included. ``band``: the mask."""

    q_runs: Runs
    k_runs: Runs
    queries: int
    keys: int
    batch: int
    band: Band
    device: torch.device


def as_one_run(rows: Rows, keys: Keys, score: Score, queries: int, band: Band) -> tuple[Rows, Keys, Score]:
    """Convert each shard of a step to one run, and ``band`` to extents. ``queries``: tokens, padding included."""
    q_runs, k_runs = tuple([pairs[0][2:5] for pairs in rows]), tuple([pair[5:8] for pair in rows[0]])
    batch, tokens, device = len(keys.kv), keys.kv.shape[1], keys.kv.device
    one = Row(-tokens, queries, 0, sum(run[1] for run in q_runs), 0, 0, sum(run[1] for run in k_runs), 0, 1, 0)
    given, shards = (score.extents, keys.extents), StepShards(q_runs, k_runs, queries, tokens, batch, band, device)
    if reusable(given, device):
        extents, key_extents = _recent(*map(Unchanged, given), shards, stream_of(device))
    else:
        extents, key_extents = _convert(*given, shards)
    return ((one,),), keys._replace(extents=key_extents), score._replace(extents=extents)


def _convert(extents: Tensor | None, key_extents: Tensor | None, shards: StepShards) -> tuple[Tensor, Tensor | None]:
    """Return extents [b s 2], cut to the mask ``of.band``, and key extents [b t 2], converted from positions to local indices."""
    least, most = _limits(shards.q_runs, shards.queries, shards.band, shards.device)
    if extents is None:
        extents = torch.stack([least[:, 0], most[:, 1]], -1).expand(shards.batch, -1, -1)
    else:
        extents = clip(extents).clamp(least, most)
    local_keys = None if key_extents is None else _local(_positions(shards.q_runs, shards.queries, shards.device), key_extents)
    return _local(_positions(shards.k_runs, shards.keys, shards.device), extents), local_keys


@lru_cache(maxsize=32)  # an entry per step and batch, some 16 bytes per token on the device: all layers and passes share it
def _recent(extents: Unchanged, key_extents: Unchanged, shards: StepShards, stream: int) -> tuple[Tensor, Tensor | None]:
    """Return the result of ``_convert``. Cache it for the CUDA ``stream`` that computes it; other streams do not read it."""
    return _convert(extents.tensor, key_extents.tensor, shards)


def _local(positions: Tensor, intervals: Tensor) -> Tensor:
    return torch.searchsorted(positions, intervals.contiguous(), out_int32=True)


@lru_cache(maxsize=64)  # an entry per rank and layout, 4 bytes per token on the device: packed batches have new layouts
def _positions(runs: Runs, tokens: int, device: torch.device) -> Tensor:
    """Return the position of each token of a shard, int32 [tokens]; ``BEYOND`` (2^30) at padding."""
    held = [torch.arange(start, start + length) for _, length, start in runs]
    padding = torch.full((tokens - sum(map(len, held)),), BEYOND)
    return torch.cat([*held, padding]).int().to(device)


@lru_cache(maxsize=8)  # an entry per mask and layout, 16 bytes per query on the device
def _limits(runs: Runs, tokens: int, band: Band, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return bounds (least, most), int32 [s 2] each: extents [s 2] clamped between these bounds lie within the mask ``band``."""
    at = _positions(runs, tokens, torch.device("cpu")).long()
    least, most = torch.zeros(tokens, 2, dtype=torch.int32), torch.full((tokens, 2), BEYOND, dtype=torch.int32)
    if band.hi is not None:
        least[:, 0] = (at - band.hi).clamp(0, BEYOND)
    if band.lo is not None:
        most[:, 1] = (at - band.lo + 1).clamp(0, BEYOND)
    return least.to(device), most.to(device)
