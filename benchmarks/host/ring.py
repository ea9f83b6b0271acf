"""The host time that a step of a ring over this host's GPUs adds to a call, and the bare send and receive of its keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ring_attn_torch import ring_attention
from ring_attn_torch.ring.transfer import send

from ..support import harness
from .calls import HEAD_DIM, HEADS
from .timing import microseconds

TOKENS = 1024


class Problem(NamedTuple):
    """The settings of the measurement, which are none: ``run_ranks`` passes such a record to every rank."""


def ring() -> list[dict[str, Any]]:
    """Return the host microseconds of a step by pass, with autograd in the caller's thread; needs two GPUs."""
    ranks = torch.cuda.device_count()
    if ranks == 1:
        return [{"ring": "needs two GPUs"}]
    return harness.run_ranks(__name__, Problem(), ranks, cpu=False)[0]


def run(problem: Problem, device: torch.device) -> list[dict[str, Any]]:
    """Measure one rank, and return the host microseconds of a step by pass."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
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
    bare, back = times["send"], times["send"] + times["send back"]
    cells = [
        {"pass": "forward", "a step": in_forward, "send and receive": bare, "beyond": in_forward - bare},
        {"pass": "backward", "a step": in_both - in_forward, "send and receive": back, "beyond": in_both - in_forward - back},
    ]
    dist.barrier()
    return [{"ranks": str(ranks), **cell} for cell in cells]
