"""Runs the layers of support/models.py with torch.nn, on a ring of gloo processes; every function is one rank's part."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ring_attn_torch import from_layout, shard_batch, to_layout
from ring_attn_torch.layers.attention import RingAttention
from ring_attn_torch.layers.dilated import DilatedRingAttention
from ring_attn_torch.layers.summary import SummaryAttention
from ring_attn_torch.layers.transformer import RingTransformer
from ring_attn_torch.training.gradients import sum_gradients
from ring_attn_torch.training.loss import loss
from ring_attn_torch.training.weights import from_numpy, to_numpy

from ..support.models import (
    LAYER,
    LEARNING_RATE,
    LENGTH,
    PACKED,
    STEPS,
    TRANSFORMER,
    Arrays,
    in_one,
    made_and_called,
    packed_batch,
    transformer_weights,
)
from ..support.spawn import Ranks

Group = dist.ProcessGroup | None


def layer_on_rank(group: Group, weights: Arrays, x: np.ndarray, dout: np.ndarray, arguments: dict[str, Any]) -> Arrays:
    """out, dx and the weights' gradients of RingAttention, gathered from all ranks, in natural order.

    With ``segments`` among the arguments it is a DilatedRingAttention, with ``summaries`` a SummaryAttention.
    """
    made, called = made_and_called(arguments)
    kind = DilatedRingAttention if "segments" in made else SummaryAttention if "summaries" in made else RingAttention
    layer = from_numpy(kind(**LAYER | made, group=group), weights)
    rank, ranks = rank_in(group), ranks_of(group)
    layout: Any = "contiguous" if isinstance(layer, SummaryAttention) else layer.options.layout
    mine = lambda array: to_layout(torch.from_numpy(array), layout, ranks).chunk(ranks, 1)[rank]
    shard = mine(x).requires_grad_()
    out = layer(shard, length=LENGTH, **{name: mine(x) if isinstance(x, np.ndarray) else x for name, x in called.items()})
    out.backward(mine(dout))
    sum_gradients(layer, group)
    assert shard.grad is not None
    return {
        "out": whole(out, layout, group),
        "dx": whole(shard.grad, layout, group),
        **gradients(layer),
    }


def transformer_on_rank(
    group: Group, weights: Arrays, ids: np.ndarray, labels: np.ndarray, layout: str, sizes: dict[str, Any]
) -> Arrays:
    """Logits of all ranks in natural order, the loss, and the gradients of every weight."""
    model = from_numpy(RingTransformer(**TRANSFORMER | sizes, layout=layout, group=group), weights)
    logits, value = step(model, group, ids=ids, labels=labels)
    return {"loss": value.detach().numpy(), "logits": whole(logits, layout, group), **gradients(model)}


def training_on_rank(group: Group, weights: Arrays, ids: np.ndarray, labels: np.ndarray, layout: str, steps: int) -> Arrays:
    """Losses of some steps of AdamW, and the weights after them."""
    model = from_numpy(RingTransformer(**TRANSFORMER, layout=layout, group=group), weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(step(model, group, ids=ids, labels=labels)[1].item())
        optimizer.step()
    return {"losses": np.array(losses), **to_numpy(model)}


def packed_training_on_rank(group: Group) -> Arrays:
    """Losses of the training of PACKED, the gradients of its first ten steps, and the weights after it."""
    model = from_numpy(RingTransformer(**PACKED, group=group), transformer_weights(**PACKED))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses, every = [], []
    for seed in range(STEPS):
        optimizer.zero_grad()
        losses.append(step(model, group, seed, **packed_batch())[1].item())
        if seed < 10:
            every.append({name: x.copy() for name, x in gradients(model).items()})
        optimizer.step()
    return {"losses": np.array(losses), **in_one(every), **to_numpy(model)}


@cache
def packed_training(pool: Ranks, ranks: int) -> list[Arrays]:
    """``packed_training_on_rank`` of every rank; it takes seconds, and two tests look at it."""
    return pool(ranks, packed_training_on_rank)


def step(model: RingTransformer, group: Group, seed: int | None = None, **data: np.ndarray) -> tuple[Tensor, Tensor]:
    """Logits of this rank and the loss of all; gradients are summed over the ranks. ``data``: what shard_batch takes."""
    layout = model.blocks[0].attention.options.layout  # type: ignore[union-attr]
    arrays: dict[str, Any] = {name: torch.from_numpy(x) for name, x in data.items()}
    batch = shard_batch(layout=layout, ranks=ranks_of(group), rank=rank_in(group), **arrays)  # type: ignore[arg-type]
    masks = {"extents": batch.extents, "key_mask": batch.key_mask}
    logits = model(batch.ids, batch.positions, batch.length, **masks, dropout_seed=seed)
    value = loss(logits, batch.labels, group=group)
    value.backward()
    sum_gradients(model, group)
    return logits, value


def gradients(module: nn.Module) -> Arrays:
    return {name: p.grad.numpy() for name, p in module.named_parameters() if p.grad is not None}


def whole(shard: Tensor, layout: str, group: Group) -> np.ndarray:
    """The array of all ranks in natural order, in float32 (float64 for float64), padding cut off."""
    shard = shard.detach().to(torch.promote_types(shard.dtype, torch.float32)).contiguous()
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
