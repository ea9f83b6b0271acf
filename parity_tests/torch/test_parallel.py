"""FSDP2, DDP, tensor parallelism and their wrappers on one mesh (data, seq, tensor): loss, gradients and norm of one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ring_attn_torch import RingTransformer, check_ranks, from_numpy, loss, shard_batch, sum_gradients, tensor_plan, to_numpy
from ring_attn_torch.training.weights import named_parameters

from ..support.models import LENGTH, TRANSFORMER, Arrays, assert_near, token_ids, transformer_weights
from ..support.selection import first
from .models import Group

RANKS = 8
BIASES = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
FEATURES: dict[str, Any] = {"qk_norm": True, **BIASES, "sinks": True, "alibi": True, "dropout_rate": 0.2}
MOST = 0.05
"""The norm to which gradients are clipped, well below theirs."""


class Hands(NamedTuple):
    """A module in the hands of others: what is called, what is done after backward, by what its loss is multiplied."""

    module: nn.Module
    settle: Callable[[], None] = lambda: None
    scale: float = 1.0


def transformer(group: Group | DeviceMesh, tied: bool) -> RingTransformer:
    sizes: dict[str, Any] = {**TRANSFORMER, **FEATURES, "tied": tied}
    return from_numpy(RingTransformer(**sizes, group=group).double(), weights(tied))


def weights(tied: bool) -> Arrays:
    return transformer_weights(tied, **{name: FEATURES[name] for name in ("qk_norm", *BIASES, "sinks")})


@cache
def the_mesh() -> DeviceMesh:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("data", "seq", "tensor"))
    mesh["data", "seq"]._flatten("tokens")
    return mesh


def sharded_by_fsdp(model: RingTransformer, mesh: DeviceMesh, factor: float | None = None) -> None:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if factor is not None and isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(factor)


def fsdp(model: RingTransformer, mesh: DeviceMesh) -> Hands:
    sharded_by_fsdp(model, mesh["tokens"], 1.0)
    return Hands(model)


def fsdp_summed(model: RingTransformer, mesh: DeviceMesh) -> Hands:
    sharded_by_fsdp(model, mesh["tokens"])
    return Hands(model, lambda: sum_gradients(model, mesh["tokens"]))


def fsdp_of_another_factor_summed(model: RingTransformer, mesh: DeviceMesh) -> Hands:
    sharded_by_fsdp(model, mesh["tokens"], 3.0)
    return Hands(model, lambda: sum_gradients(model, mesh["tokens"]))


def hybrid_fsdp_summed(model: RingTransformer, mesh: DeviceMesh) -> Hands:
    sharded_by_fsdp(model, mesh["data", "seq"])
    return Hands(model, lambda: sum_gradients(model, mesh["tokens"]))


def fsdp_over_data_summed_over_seq(model: RingTransformer, mesh: DeviceMesh) -> Hands:
    sharded_by_fsdp(model, mesh["data"])
    return Hands(model, lambda: sum_gradients(model, mesh["seq"]))


def ddp(model: RingTransformer, mesh: DeviceMesh) -> Hands:
    return Hands(nn.parallel.DistributedDataParallel(model, process_group=mesh["tokens"].get_group()), scale=4.0)


def ddp_summed(model: RingTransformer, mesh: DeviceMesh) -> Hands:
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=mesh["data"].get_group())
    return Hands(wrapped, lambda: sum_gradients(wrapped, mesh["tokens"]))


def checkpointed(model: RingTransformer, mesh: DeviceMesh) -> Hands:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    return Hands(model, lambda: sum_gradients(model, mesh["tokens"]))


def tensor(model: RingTransformer, mesh: DeviceMesh) -> Hands:
    from torch.distributed.tensor.parallel import parallelize_module

    parallelize_module(model, mesh["tensor"], tensor_plan(model))
    return Hands(model, lambda: sum_gradients(model, mesh["tokens"]))


def tensor_and_fsdp(model: RingTransformer, mesh: DeviceMesh) -> Hands:
    tensor(model, mesh)
    sharded_by_fsdp(model, mesh["tokens"], 1.0)
    return Hands(model)


def tensor_and_fsdp_summed(model: RingTransformer, mesh: DeviceMesh) -> Hands:
    tensor(model, mesh)
    sharded_by_fsdp(model, mesh["tokens"])
    return Hands(model, lambda: sum_gradients(model, mesh["tokens"]))


WAYS = [
    fsdp,
    fsdp_summed,
    fsdp_of_another_factor_summed,
    hybrid_fsdp_summed,
    fsdp_over_data_summed_over_seq,
    ddp,
    ddp_summed,
    checkpointed,
    tensor,
    tensor_and_fsdp,
    tensor_and_fsdp_summed,
]


EVERY_RUN = (ddp_summed, checkpointed, tensor_and_fsdp_summed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", first(sorted(WAYS, key=lambda way: way not in EVERY_RUN), len(EVERY_RUN)), ids=lambda way: way.__name__
)
def test_gradients_and_their_norm_are_those_of_one_device_by_any_way_to_reduce_them(gloo, way):
    tied = WAYS.index(way) % 2 == 1
    truth = one_device(tied)
    for got in gloo(RANKS, in_hands, way, tied):
        assert_near(got, truth, 1e-12)


@cache
def one_device(tied: bool) -> Arrays:
    return trained(Hands(transformer(None, tied)), 0, 1, 0, None)


def in_hands(group: Group, way: Callable[[RingTransformer, DeviceMesh], Hands], tied: bool) -> Arrays:
    mesh = the_mesh()
    model = transformer(mesh["seq"], tied)
    hands = way(model, mesh)
    with torch.no_grad():  # after this FSDP2's root holds gathered weights, which are not what it keeps
        hands.module(torch.zeros(1, 6, dtype=torch.int64), dropout_seed=3)
    from_numpy(hands.module, {name: -x for name, x in weights(tied).items()})
    check_ranks(hands.module)
    for name, x in to_numpy(from_numpy(hands.module, weights(tied))).items():
        np.testing.assert_array_equal(x, weights(tied)[name])
    return trained(hands, mesh.get_local_rank("data"), 2, mesh.get_local_rank("seq"), mesh["tokens"])


def trained(hands: Hands, row: int, ranks: int, rank: int, group: DeviceMesh | None) -> Arrays:
    """The loss, the gradient of every weight and their norm, whole, and their norm after they were clipped."""
    ids, labels = (torch.from_numpy(x) for x in token_ids())
    rows = slice(row, row + 1) if ranks > 1 else slice(None)
    shard = shard_batch(ids[rows], "zigzag", ranks, rank, labels=labels[rows])
    logits = hands.module(shard.ids, length=LENGTH, dropout_seed=3, dropout_offset=(row, 0))
    value = loss(logits, shard.labels, group=group)
    (value * hands.scale).backward()
    hands.settle()
    gradients = {name: whole(p.grad) for name, p in named_parameters(hands.module).items()}
    norm = whole(nn.utils.clip_grad_norm_(hands.module.parameters(), MOST))
    clipped = np.linalg.norm([np.linalg.norm(whole(p.grad)) for p in hands.module.parameters()])
    return {"loss": value.detach().numpy(), "norm": norm, "clipped": np.array(clipped), **gradients}


def whole(x: Any) -> np.ndarray:
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).numpy(force=True).copy()


def test_gradients_are_not_summed_over_ranks_that_share_a_weight_or_that_fsdp_has_summed_in_part(gloo):
    gloo(RANKS, refused)


def refused(group: Group) -> None:
    mesh = the_mesh()
    model = tensor(transformer(mesh["seq"], False), mesh).module
    with pytest.raises(ValueError, match=r"^the gradient of embed.weight cannot .* the same tokens, by ranks \[\d, \d\]: pass"):
        sum_gradients(model)
    model = transformer(mesh["seq"], False)
    sharded_by_fsdp(model, mesh["data"])
    with pytest.raises(ValueError, match=r"FSDP has summed it already over ranks \[\d, \d\]: pass as group, .* FSDP has not"):
        sum_gradients(model, mesh["tokens"])
    assert all(p.grad is None for p in model.parameters())


def test_heads_that_tensor_parallel_ranks_cannot_share_are_refused(gloo):
    gloo(RANKS, heads_refused)


def heads_refused(group: Group) -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    sizes: dict[str, Any] = {**TRANSFORMER, "kv_heads": 1}
    model = RingTransformer(**sizes)
    with pytest.raises(ValueError, match="kv_heads=1 cannot be shared equally by the 2 ranks of tensor parallelism: choose"):
        parallelize_module(model, the_mesh()["tensor"], tensor_plan(model))


@pytest.mark.slow
def test_wrappers_of_a_module_are_not_part_of_its_weights_names(gloo):
    gloo(1, named_alike)


def named_alike(group: Group) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = transformer(group, True)
    plain = to_numpy(model)
    model.blocks[0] = checkpoint_wrapper(torch.compile(model.blocks[0]))  # type: ignore[arg-type]
    for wrapped in (torch.compile(model), nn.parallel.DistributedDataParallel(torch.compile(model), process_group=group)):
        assert to_numpy(wrapped).keys() == plain.keys()  # type: ignore[arg-type]
        for name, x in to_numpy(from_numpy(wrapped, {name: 2 * x for name, x in plain.items()})).items():  # type: ignore[type-var]
            np.testing.assert_array_equal(x, 2 * plain[name])
    own = nn.Module()
    own.module = nn.Linear(2, 2)
    assert set(to_numpy(own)) == {"module.weight", "module.bias"}


class Own(nn.Module):
    """A wrapper of somebody who knows nothing of what it wraps."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *arrays: Any, **arguments: Any) -> torch.Tensor:
        return self.block(*arrays, **arguments)


def test_a_wrapped_block_need_not_show_its_attention():
    model = transformer(None, True)
    ids = torch.from_numpy(token_ids()[0])[:, :36]
    logits = model(ids)
    model.blocks[0] = Own(model.blocks[0])
    torch.testing.assert_close(model(ids), logits, rtol=0, atol=0)
