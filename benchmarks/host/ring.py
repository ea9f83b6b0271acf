"""The host time that a step of a ring over this host's GPUs adds to a call, and the bare send and receive of its keys."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist

from ring_attn_torch import ring_attention
from ring_attn_torch.ring.transfer import send

from .calls import HEAD_DIM, HEADS
from .timing import microseconds

TOKENS = 1024


def ring() -> list[dict[str, Any]]:
    """Return the host microseconds of a step by pass, with autograd in the caller's thread; needs two GPUs."""
    ranks = torch.cuda.device_count()
    if ranks == 1:
        return [{"ring": "needs two GPUs"}]
    with tempfile.TemporaryDirectory() as folder:
        spawn = multiprocessing.get_context("spawn")
        results, store = spawn.SimpleQueue(), os.path.join(folder, "store")
        processes = [spawn.Process(target=_rank, args=(rank, ranks, store, results)) for rank in range(ranks)]
        for process in processes:
            process.start()
        cells = results.get()
        for process in processes:
            process.join()
        return cells


def _rank(rank: int, ranks: int, store: str, results: Any) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=ranks)
    group, alone = dist.group.WORLD, [dist.new_group([other]) for other in range(ranks)][rank]
    shape = 1, TOKENS, HEADS, HEAD_DIM
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(4))
    keys, dkv = torch.cat([k, v], -1).detach(), torch.cat([k, v], -1).detach().float()
    forward = torch.no_grad()(lambda group: ring_attention(q, k, v, group=group))
    dout = dout.detach()

    @torch.autograd.set_multithreading_enabled(False)
    def both(group: Any) -> None:
        torch.autograd.grad(ring_attention(q, k, v, group=group), (q, k, v), dout)

    works = {
        "alone": lambda: forward(alone),
        "ring": lambda: forward(group),
        "send": lambda: send((keys,), 1, group).wait(),
        "both alone": lambda: both(alone),
        "both ring": lambda: both(group),
        "send back": lambda: send((dkv,), 1, group).wait(),
    }
    times = microseconds(works)
    steps = ranks - 1
    in_forward = (times["ring"] - times["alone"]) / steps
    in_both = (times["both ring"] - times["both alone"]) / steps
    if rank == 0:
        bare, back = times["send"], times["send"] + times["send back"]
        cells = [
            {"pass": "forward", "a step": in_forward, "send and receive": bare, "beyond": in_forward - bare},
            {"pass": "backward", "a step": in_both - in_forward, "send and receive": back, "beyond": in_both - in_forward - back},
        ]
        results.put([{"ranks": str(ranks), **cell} for cell in cells])
    dist.barrier()
    dist.destroy_process_group()
