"""The steps of one rank under accelerate's context parallelism: an Accelerator prepares FSDP2 and shards each batch."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

from ..support.rank import timed
from .problem import CLIP, LEARNING_RATE, Problem, flops_per_token, made


def prepared(problem: Problem, length: int, device: torch.device) -> tuple[Accelerator, Any, Any]:
    """Return the accelerator, the model and its optimizer, with the same dtypes and shards as the model of the ring."""
    launched = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": dist.get_world_size()}
    os.environ.update({name: str(value) for name, value in launched.items()})
    with device:
        model = made(problem, length).train()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    sharding = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", mixed_precision_policy=policy, cpu_ram_efficient_loading=False
    )
    accelerator = Accelerator(fsdp_plugin=sharding, parallelism_config=ParallelismConfig(cp_size=dist.get_world_size()))
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=True)
    return accelerator, *accelerator.prepare(model, optimizer)


def run(problem: Problem, device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        raise ValueError("accelerate's context parallelism runs on GPUs only: leave out tiny")
    ranks = dist.get_world_size()
    length = problem.tokens * ranks
    accelerator, model, optimizer = prepared(problem, length, device)
    torch.manual_seed(0)  # the same batch on every rank
    ids = torch.randint(model.config.vocab_size, (1, length), device=device)

    def step() -> float:
        batch = {"input_ids": ids.clone(), "labels": ids.clone(), "position_ids": torch.arange(length, device=device)[None]}
        batch["shift_labels"] = F.pad(ids, (0, 1), value=-100)[:, 1:].contiguous()
        buffers = [*batch.values()]
        with accelerator.maybe_context_parallel(buffers, [1] * len(buffers), {*buffers}):
            value = model(**batch, use_cache=False).loss
            optimizer.zero_grad()
            accelerator.backward(value)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        torch.cuda.synchronize()
        mean = value.detach() / ranks
        dist.all_reduce(mean)
        return mean.item()

    found = timed(step, problem.steps, dist.barrier)
    return found | {"peak": torch.cuda.max_memory_allocated(), "flops": problem.tokens * flops_per_token(model.config, length)}
