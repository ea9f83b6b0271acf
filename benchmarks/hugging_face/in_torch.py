"""The steps of one rank: FSDP2 over all GPUs, which also form the ring."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from ring_attn_torch.transformers import sequence_parallel

from ..support.rank import timed
from .problem import CLIP, LEARNING_RATE, LOSS_CHUNK, Problem, flops_per_token
from .problem import made as on_meta


def made(problem: Problem, length: int, device: torch.device) -> PreTrainedModel:
    """Build the model with float32 weights, sharded before they are allocated, and layers computed in bfloat16."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("ring",))
    with torch.device("meta"):
        model = on_meta(problem, length)
    policy = MixedPrecisionPolicy() if problem.tiny else MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    torch.manual_seed(dist.get_rank())
    for name, p in model.named_parameters():
        nn.init.ones_(p) if "norm" in name else nn.init.normal_(p, std=0.02)
    _make_buffers(model, device)
    return model.train()


def _make_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Recompute the rotary frequencies from the config, because on the meta device they have no values."""
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config=model.config).to(device)


def run(problem: Problem, device: torch.device) -> dict[str, Any]:
    ranks = dist.get_world_size()
    length = problem.tokens * ranks
    model = made(problem, length, device)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=device.type == "cuda")
    torch.manual_seed(0)  # the same batch on every rank
    ids = torch.randint(model.config.vocab_size, (1, length), device=device)
    inside = sequence_parallel(model, loss_chunk=LOSS_CHUNK) if problem.attention == "ring" else nullcontext()

    def step() -> float:
        value = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        (value * ranks).backward()  # FSDP averages the ranks' partial gradients
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return value.item()

    with inside:
        found = timed(step, problem.steps, dist.barrier)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return found | {"peak": peak, "flops": problem.tokens * flops_per_token(model.config, length)}
