"""The steps in PyTorch: one process, or one of four under PyTorch's own parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_torch import RingTransformer, from_numpy, loss, shard_batch, sum_gradients, tensor_plan, to_numpy

from .recipe import BETAS, CHUNK, CLIP, DECAY, EPS, LEARNING_RATE, ROWS, Recipe, batch

RANKS = 4
Losses = dict[str, list[float]]


class Hands(NamedTuple):
    """A model under one kind of parallelism.

    ``module``: the module to call. ``settle``: a function to call after backward. ``scale``: the factor of the loss. ``chunked``:
    True if the loss takes hidden states and the whole head instead of logits.
    """

    module: nn.Module
    settle: Callable[[], None] = lambda: None
    scale: float = 1.0
    chunked: bool = False


def summed(model: RingTransformer, mesh: DeviceMesh) -> Hands:
    """Return the plain ring: this library's ``sum_gradients`` sums the ranks' gradients."""
    return Hands(model, lambda: sum_gradients(model, tokens_of(mesh)), chunked=True)


def fsdp2(model: RingTransformer, mesh: DeviceMesh) -> Hands:
    """Shard weights, gradients and optimizer state over all ranks with FSDP2."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    for module in (*model.blocks, model):
        fully_shard(module, mesh=tokens_of(mesh))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return Hands(model, chunked=True)


def ddp(model: RingTransformer, mesh: DeviceMesh) -> Hands:
    """Replicate the weights with DDP, which averages the gradients."""
    return Hands(nn.parallel.DistributedDataParallel(model, process_group=tokens_of(mesh).get_group()), scale=RANKS)


def tensor(model: RingTransformer, mesh: DeviceMesh) -> Hands:
    """Shard heads and MLP features over the tensor axis, and the sequence over rings of the other ranks."""
    from torch.distributed.tensor.parallel import parallelize_module

    parallelize_module(model, mesh["tensor"], tensor_plan(model))
    return Hands(model, lambda: sum_gradients(model, tokens_of(mesh)))


class Way(NamedTuple):
    """A way of training: mesh sizes (data, seq, tensor), and the function that applies its parallelism."""

    shape: tuple[int, int, int]
    hands: Callable[[RingTransformer, DeviceMesh], Hands]


WAYS = {
    "PyTorch, a ring of 4": Way((1, 4, 1), summed),
    "PyTorch, FSDP2 over 2 x a ring of 2": Way((2, 2, 1), fsdp2),
    "PyTorch, DDP over 2 x a ring of 2": Way((2, 2, 1), ddp),
    "PyTorch, a ring of 2 x TP of 2": Way((1, 2, 2), tensor),
}


def mesh_of(way: Way) -> DeviceMesh:
    """Build the mesh over the first four ranks. All ranks must call it."""
    mesh = DeviceMesh("cpu", torch.arange(RANKS).view(way.shape), mesh_dim_names=("data", "seq", "tensor"))
    if mesh.shape[0] > 1:
        mesh["data", "seq"]._flatten("tokens")
    return mesh


def tokens_of(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of the ranks that hold different tokens."""
    return mesh["tokens"] if mesh.shape[0] > 1 else mesh["seq"]


def made(recipe: Recipe, mesh: DeviceMesh | None = None) -> RingTransformer:
    """Build the model with its initial weights."""
    model = RingTransformer.from_config(recipe.config, group=None if mesh is None else mesh["seq"])
    return from_numpy(model, recipe.weights(to_numpy(model)))


def train(recipe: Recipe, model: RingTransformer, way: Way | None = None, mesh: DeviceMesh | None = None) -> Losses:
    """Train and return the loss of each step and its gradient norm before clipping; on one process if ``way`` is None."""
    together = None if mesh is None else tokens_of(mesh)
    hands = Hands(model, chunked=True) if way is None or mesh is None else way.hands(model, mesh)
    optimizer = optimizer_of(recipe, hands.module)
    found: Losses = {"losses": [], "norms": []}
    for step in range(recipe.steps):
        value = loss_of(hands, step, mesh, together)
        optimizer.zero_grad()
        (value * hands.scale).backward()
        hands.settle()
        norm: Any = nn.utils.clip_grad_norm_(hands.module.parameters(), CLIP)
        optimizer.step()
        found["losses"].append(value.item())
        found["norms"].append((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item())
    return found


def optimizer_of(recipe: Recipe, module: nn.Module) -> torch.optim.Optimizer:
    rate = LEARNING_RATE[recipe.optimizer]
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(module.parameters(), rate)
    return torch.optim.AdamW(module.parameters(), rate, BETAS, EPS, DECAY)


def loss_of(hands: Hands, step: int, mesh: DeviceMesh | None, together: DeviceMesh | None) -> Tensor:
    """Return the mean loss over all ranks' labels."""
    place = lambda axis: (1, 0) if mesh is None else (mesh[axis].size(), mesh.get_local_rank(axis))
    (parts, part), (ranks, rank) = place("data"), place("seq")
    rows = slice(part * ROWS // parts, (part + 1) * ROWS // parts)
    whole: dict[str, Any] = {name: torch.from_numpy(x[rows]) for name, x in batch(step).items()}
    shard = shard_batch(layout="zigzag", ranks=ranks, rank=rank, **whole)
    masks: dict[str, Any] = {"extents": shard.extents, "key_mask": shard.key_mask}
    masks |= {"dropout_seed": step, "dropout_offset": (rows.start, 0), "return_hidden": hands.chunked}
    given = hands.module(shard.ids, shard.positions, shard.length, **masks)
    head: dict[str, Any] = {"head": hands.module.head_weight, "chunk": CHUNK} if hands.chunked else {}
    return loss(given, shard.labels, group=together, **head)
