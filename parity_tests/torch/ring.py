"""Runs a case of parity_tests/support/cases.py on the PyTorch ring."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.reference.oracle import Attention
from ring_attn_torch import ring_attention
from ring_attn_torch.attend import tiles
from ring_attn_torch.ring import collectives

from ..support.cases import Case, check_same
from ..support.spawn import PerRank, Ranks


def options(plan: RingPlan) -> dict[str, Any]:
    return {"layout": plan.layout, "mask": plan.mask, "length": plan.length, "kv_length": plan.kv_length}


def run(pool: Ranks, case: Case, function: Callable[..., list[np.ndarray]] | None = None) -> Attention:
    """out, lse, dq, dk, dv as whole arrays in natural order, padding included; dsinks summed over the ranks.

    ``function``: what every rank runs, ``on_rank`` unless told otherwise.
    """
    results = pool(case.ranks, function or on_rank, replace(case), *(PerRank(*shards) for shards in case.inputs()))
    sharded = "qqqk" if case.values_in_keys else "qqqkk"
    dsinks = np.sum([r[len(sharded)] for r in results], 0) if case.sinks else None
    whole = [case.gather([r[i] for r in results], of) for i, of in enumerate(sharded)]
    return Attention(*[*whole, None][:5], dsinks=dsinks)


def run_or_restart(pool: Ranks, case: Case, function: Callable[..., list[np.ndarray]] | None = None) -> Attention:
    """``run``; after an error the pool is closed, so that ranks which still wait for one another spoil no later case."""
    try:
        return run(pool, case, function)
    except Exception:
        pool.close()
        raise


def on_rank(group: Any, case: Case, *shards: np.ndarray) -> list[np.ndarray]:
    """One rank's out, lse, dq, dk, dv and part of dsinks; what a process of the pool runs."""
    device = dist.get_backend_config().split(":")[0]
    q, k, v, dout = (torch.from_numpy(x).to(device, getattr(torch, case.dtype)) for x in shards[:4])
    dlse, *features = (torch.from_numpy(x).to(device) for x in shards[4:])
    arguments: dict[str, Any] = dict(zip(case.features, features, strict=True)) | {"strategy": case.strategy, "order": case.order}
    v, arguments = (None, arguments | case.v_dims) if case.values_in_keys else (v, arguments)
    leaves = [x.requires_grad_() for x in (q, k, v, arguments.get("sinks")) if x is not None]
    with patch_tiles(case):
        out, lse = ring_attention(q, k, v, group=group, **options(case.plan), **case.scalars, **arguments, return_lse=True)
        gradients = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    wide = torch.promote_types(out.dtype, torch.float32)
    return [x.detach().to(wide).cpu().numpy() for x in (out, lse, *gradients)]


def patch_tiles(case: Case):
    choose = tiles.blockwise_tiles if case.tiles is None else lambda rows, q, k: case.tiles
    return patch.object(tiles, "blockwise_tiles", choose)


def late(function: Callable[..., Any], draw: random.Random, most: float = 0.01) -> Callable[..., Any]:
    """Return ``function``, before which a rank waits for at most so many seconds, drawn anew at each call."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        time.sleep(draw.uniform(0, most))
        return function(*arguments, **keywords)

    return call


def delayed(seed: int, group: Any, case: Case, *shards: Any) -> Any:
    """``on_rank``, with a random delay before every transfer."""
    draw = random.Random(1000 * seed + dist.get_rank(group))
    replaced: dict[str, Any] = {name: late(getattr(dist, name), draw) for name in ("batch_isend_irecv", "all_to_all_single")}
    gather = patch.object(collectives, "all_gather_single", late(collectives.all_gather_single, draw))
    with patch.multiple(dist, **replaced), gather:
        return on_rank(group, case, *shards)


def check_late_ranks(pool: Ranks, case: Case, delays: int, function: Any = delayed, on_time: Any = None) -> Attention:
    """Assert that runs with random delays, each with a seed of its own, have the bits of a run ``on_time``, which is returned."""
    expected = run(pool, case, on_time)
    for number in range(delays):
        check_same(run(pool, case, partial(function, number)), expected)
    return expected
