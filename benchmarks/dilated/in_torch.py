"""The measurement in PyTorch: one process per rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn_torch import dilated_attention, ring_attention

from ..support.process import Memory
from .problem import Problem


def run(problem: Problem, device: torch.device) -> dict[str, Any]:
    shape = 1, problem.tokens // dist.get_world_size(), problem.heads, problem.head_dim
    torch.manual_seed(dist.get_rank())
    q, k, v, dout = (torch.randn(shape, device=device).to(getattr(torch, problem.dtype)) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    patterns = {"segments": problem.segments, "dilations": problem.dilations}
    works: dict[str, Callable[[], Tensor]] = {
        "dilated": lambda: dilated_attention(*inputs, **patterns),
        "exact": lambda: ring_attention(*inputs, layout="zigzag"),  # the tokens are random: the fastest layout will do
    }
    found: dict[str, Any] = {}
    for name, steps in (("dilated", 2), ("exact", problem.exact_steps), ("dilated", problem.steps)):
        if not steps:
            continue
        found[name] = _steps(works[name], inputs, dout, steps + 1)
    return found


def _steps(work: Callable[[], Tensor], inputs: list[Tensor], dout: Tensor, steps: int) -> dict[str, Any]:
    """Return the seconds of each step after the first, the peak bytes, and whether all results are finite.

    Keys: "forward" is the forward alone, "both" forward and backward, "first" the first step of both.
    """
    forward, both, finite = [], [], True
    on_gpu = dout.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if on_gpu else 0
    resident = Memory()
    for _ in range(steps):
        for x in inputs:
            x.grad = None
        _wait(on_gpu)
        began = time.perf_counter()
        out = work()
        _wait(on_gpu, alone=True)
        forward.append(time.perf_counter() - began)
        out.backward(dout)
        _wait(on_gpu)
        both.append(time.perf_counter() - began)
        gradients = [x.grad for x in inputs if x.grad is not None]
        finite = finite and len(gradients) == 3 and all(bool(x.isfinite().all()) for x in (out, *gradients))
    peak = torch.cuda.max_memory_allocated() - held if on_gpu else resident.peak()
    return {"forward": forward[1:], "both": both[1:], "first": both[0], "finite": finite, "peak": peak}


def _wait(on_gpu: bool, alone: bool = False) -> None:
    if on_gpu:
        torch.cuda.synchronize()
    if not alone:
        dist.barrier()
