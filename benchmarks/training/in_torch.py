"""The steps of one rank in PyTorch: FSDP2 over all GPUs, which also form the ring."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from ring_attn_torch import RingTransformer, loss

from ..support.rank import timed
from .problem import CLIP, LEARNING_RATE, Problem, config_of


def made(problem: Problem, device: torch.device) -> RingTransformer:
    """Build the model, with the weights sharded before they are allocated."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("seq",))
    with torch.device("meta"):
        model = RingTransformer.from_config(config_of(problem), group=mesh["seq"], activations=problem.activations)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(device.type == "cpu")
    model.to_empty(device=device)
    torch.manual_seed(dist.get_rank())
    for p in model.parameters():
        nn.init.ones_(p) if p.ndim == 1 else nn.init.normal_(p, std=0.02)
    return model


def run(problem: Problem, device: torch.device) -> dict[str, Any]:
    model = made(problem, device)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=device.type == "cuda")
    ids, labels = (torch.randint(config_of(problem).vocab, (1, problem.tokens), device=device) for _ in range(2))

    def step() -> float:
        hidden = model(ids, return_hidden=True)
        value = loss(hidden, labels, head=model.head_weight, chunk=problem.loss_chunk)
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return value.item()

    found = timed(step, problem.steps, dist.barrier)
    return found | {"peak": torch.cuda.max_memory_allocated() if device.type == "cuda" else 0}
