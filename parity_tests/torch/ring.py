"""Runs a case of parity_tests/cases.py on the PyTorch ring."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from parity_tests.cases import Case
from parity_tests.spawn import PerRank, Ranks
from ring_attn_core.oracle import Attention
from ring_attn_core.plan import RingPlan
from ring_attn_torch import blockwise, ring_attention


def options(plan: RingPlan) -> dict[str, Any]:
    return {"layout": plan.layout, "mask": plan.mask, "length": plan.length, "kv_length": plan.kv_length}


def run(pool: Ranks, case: Case) -> Attention:
    """out, lse, dq, dk, dv as whole arrays in natural order, padding included."""
    results = pool(case.ranks, on_rank, replace(case), *(PerRank(*shards) for shards in case.inputs()))
    return Attention(*(case.gather([r[i] for r in results], of) for i, of in enumerate("qqqkk")))


def on_rank(group: Any, case: Case, *shards: np.ndarray) -> list[np.ndarray]:
    """One rank's out, lse, dq, dk, dv; what a process of the pool runs."""
    device = dist.get_backend_config().split(":")[0]
    q, k, v, dout = (torch.from_numpy(x).to(device, getattr(torch, case.dtype)) for x in shards[:4])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with patch_tiles(case):
        out, lse = ring_attention(*leaves, group=group, **options(case.plan), scale=case.scale, return_lse=True)
        gradients = torch.autograd.grad((out, lse), leaves, (dout, torch.from_numpy(shards[4]).to(device)))
    wide = torch.promote_types(out.dtype, torch.float32)
    return [x.detach().to(wide).cpu().numpy() for x in (out, lse, *gradients)]


def patch_tiles(case: Case):
    choose = blockwise.blockwise_tiles if case.tiles is None else lambda rows, q, k: case.tiles
    return patch.object(blockwise, "blockwise_tiles", choose)
