"""Runs the layers of parity_tests/models.py with torch.nn, on a ring of gloo processes; every function is one rank's part."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parity_tests.models import LAYER, LENGTH, TRANSFORMER, Arrays
from ring_attn_torch import from_layout, shard_batch, to_layout
from ring_attn_torch.layers import RingAttention
from ring_attn_torch.state import from_numpy, to_numpy
from ring_attn_torch.transformer import RingTransformer, loss, sum_gradients

Group = dist.ProcessGroup | None


def layer_on_rank(group: Group, weights: Arrays, x: np.ndarray, dout: np.ndarray, sizes: dict[str, Any]) -> Arrays:
    """out, dx and the weights' gradients of RingAttention, gathered from all ranks, in natural order."""
    layer = from_numpy(RingAttention(**LAYER | sizes, group=group), weights)
    rank, ranks = rank_in(group), ranks_of(group)
    mine = lambda array: to_layout(torch.from_numpy(array), layer.layout, ranks).chunk(ranks, 1)[rank]
    shard = mine(x).requires_grad_()
    out = layer(shard, length=LENGTH)
    out.backward(mine(dout))
    sum_gradients(layer, group)
    assert shard.grad is not None
    return {"out": whole(out, layer.layout, group), "dx": whole(shard.grad, layer.layout, group), **gradients(layer)}


def transformer_on_rank(
    group: Group, weights: Arrays, ids: np.ndarray, labels: np.ndarray, layout: str, sizes: dict[str, Any]
) -> Arrays:
    """Logits of all ranks in natural order, the loss, and the gradients of every weight."""
    model = from_numpy(RingTransformer(**TRANSFORMER | sizes, layout=layout, group=group), weights)
    logits, value = step(model, group, ids, labels)
    return {"loss": value.detach().numpy(), "logits": whole(logits, layout, group), **gradients(model)}


def training_on_rank(group: Group, weights: Arrays, ids: np.ndarray, labels: np.ndarray, layout: str, steps: int) -> Arrays:
    """Losses of some steps of AdamW, and the weights after them."""
    model = from_numpy(RingTransformer(**TRANSFORMER, layout=layout, group=group), weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(step(model, group, ids, labels)[1].item())
        optimizer.step()
    return {"losses": np.array(losses), **to_numpy(model)}


def step(model: RingTransformer, group: Group, ids: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
    """Logits of this rank and the loss of all; gradients are summed over the ranks."""
    layout = model.blocks[0].attention.layout  # type: ignore[union-attr]
    batch = shard_batch(torch.from_numpy(ids), layout, ranks_of(group), rank_in(group), labels=torch.from_numpy(labels))  # type: ignore[arg-type]
    logits = model(batch.ids, batch.positions, batch.length)
    value = loss(logits, batch.labels, group=group)
    value.backward()
    sum_gradients(model, group)
    return logits, value


def gradients(module: nn.Module) -> Arrays:
    return {name: p.grad.numpy() for name, p in module.named_parameters() if p.grad is not None}


def whole(shard: Tensor, layout: str, group: Group) -> np.ndarray:
    """The array of all ranks in natural order, in float32, padding cut off."""
    shard = shard.detach().float().contiguous()
    shards = [torch.empty_like(shard) for _ in range(ranks_of(group))]
    if group is None:
        shards = [shard]
    else:
        dist.all_gather(shards, shard, group=group)
    return from_layout(torch.cat(shards, 1), layout, ranks_of(group), LENGTH).numpy()


def ranks_of(group: Group) -> int:
    return 1 if group is None else dist.get_world_size(group)


def rank_in(group: Group) -> int:
    return 0 if group is None else dist.get_rank(group)
