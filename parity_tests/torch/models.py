"""Runs the layers of support/models.py with torch.nn, on a ring of gloo processes; every function is one rank's part."""

from __future__ import annotations

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
from ring_attn_torch.training.weights import from_numpy

from ..support.models import LAYER, LENGTH, TRANSFORMER, Arrays, made_and_called, transformer_weights

Group = dist.ProcessGroup | None


def layer_on_rank(group: Group, weights: Arrays, x: np.ndarray, dout: np.ndarray, arguments: dict[str, Any]) -> Arrays:
    """out, dx and the weights' gradients of RingAttention, gathered from all ranks, in natural order.

    With ``segments`` among the arguments it is a DilatedRingAttention, with ``summaries`` a SummaryAttention. With a ``context``
    there is dcontext too.
    """
    made, called = made_and_called(arguments)
    kind = DilatedRingAttention if "segments" in made else SummaryAttention if "summaries" in made else RingAttention
    layer = from_numpy(kind(**LAYER | made, group=group), weights)
    rank, ranks = rank_in(group), ranks_of(group)
    layout: Any = "contiguous" if isinstance(layer, SummaryAttention) else layer.options.layout
    mine = lambda array: to_layout(torch.from_numpy(array), layout, ranks).chunk(ranks, 1)[rank]
    given = {"x": x} | called
    shards = {name: mine(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
    leaves = {name: shards[name].requires_grad_() for name in ("x", "context") if name in shards}
    out = layer(length=LENGTH, **shards)
    out.backward(mine(dout))
    sum_gradients(layer, group)
    named = {f"d{name}": whole(leaf.grad, layout, group, given[name].shape[1]) for name, leaf in leaves.items()}  # type: ignore
    return {"out": whole(out, layout, group), **named, **gradients(layer)}


def transformer_on_rank(
    group: Group, layout: str, data: Arrays, seed: int | None = None, chunk: int | None = None, **sizes: Any
) -> Arrays:
    """Logits of all ranks in natural order, the loss, and the gradients of every weight; ``data``: what shard_batch takes."""
    model = RingTransformer(**TRANSFORMER | sizes, layout=layout, group=group)  # type: ignore[arg-type]
    from_numpy(model, transformer_weights(**sizes))
    logits, value = step(model, group, seed, chunk, **data)
    logits = whole(logits, layout, group, data["ids"].shape[1])
    return {"loss": value.detach().numpy(), "logits": logits, **gradients(model)}


def step(
    model: RingTransformer, group: Group, seed: int | None = None, chunk: int | None = None, **data: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Logits of this rank and the loss of all; gradients are summed over the ranks. ``data``: what shard_batch takes.

    ``chunk``: that of the loss of hidden states, None for one of logits.
    """
    layout = model.blocks[0].attention.options.layout  # type: ignore[union-attr]
    arrays: dict[str, Any] = {name: torch.from_numpy(x) for name, x in data.items()}
    batch = shard_batch(layout=layout, ranks=ranks_of(group), rank=rank_in(group), **arrays)  # type: ignore[arg-type]
    masks = {"extents": batch.extents, "key_mask": batch.key_mask}
    out = model(batch.ids, batch.positions, batch.length, **masks, dropout_seed=seed, return_hidden=chunk is not None)
    head = {} if chunk is None else {"head": model.head_weight, "chunk": chunk}
    value = loss(out, batch.labels, group=group, **head)
    value.backward()
    sum_gradients(model, group)
    return out if chunk is None else out @ model.head_weight.T, value


def gradients(module: nn.Module) -> Arrays:
    return {name: p.grad.numpy() for name, p in module.named_parameters() if p.grad is not None}


def whole(shard: Tensor, layout: str, group: Group, length: int = LENGTH) -> np.ndarray:
    """The array of all ranks in natural order, in float32 (float64 for float64), padding cut off."""
    shard = shard.detach().to(torch.promote_types(shard.dtype, torch.float32)).contiguous()
    shards = [torch.empty_like(shard) for _ in range(ranks_of(group))]
    if group is None:
        shards = [shard]
    else:
        dist.all_gather(shards, shard, group=group)
    return from_layout(torch.cat(shards, 1), layout, ranks_of(group), length).numpy()


def ranks_of(group: Group) -> int:
    return 1 if group is None else dist.get_world_size(group)


def rank_in(group: Group) -> int:
    return 0 if group is None else dist.get_rank(group)


def shard_fully(group: Group, *modules: nn.Module) -> None:
    """Shard the weights of modules over the ranks by FSDP2, one group of weights for each."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    assert group is not None
    mesh = DeviceMesh.from_group(group, "cpu")
    for module in modules:
        fully_shard(module, mesh=mesh)
