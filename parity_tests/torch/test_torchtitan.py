"""torchtitan's models with RingInnerAttention on a cp axis: losses and gradients of its FlexAttention's masks on one process."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

try:
    titan: Any = importlib.import_module("ring_attn_torch.torchtitan")
except ImportError as error:  # of a part of torchtitan that needs more packages
    pytest.skip(str(error), allow_module_level=True)

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..support.models import Arrays, apart

pytest.importorskip("torchtitan")


pytestmark = pytest.mark.slow
BATCH, TOKENS, VOCAB = 2, 32, 64
ENDS = torch.tensor([0, 5, 18, 19, TOKENS])


def model_of(window: tuple[int, int], parallelism: Any = None) -> Any:
    """torchtitan's debug model of Llama 3, small, with our inner attention; sharded as ``parallelism`` says."""
    llama: Any = importlib.import_module("torchtitan.models.llama3")
    config = llama.llama3_configs["debugmodel"](attn_backend="flex")
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = titan.RingInnerAttention.Config(window_size=window)
    if parallelism is not None:
        config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    return model


def dense(window: tuple[int, int], documents: bool) -> torch.Tensor:
    lag = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    mask = (lag >= 0) if window[0] < 0 else (lag >= 0) & (lag <= window[0])
    of = torch.bucketize(torch.arange(TOKENS), ENDS[1:], right=True)
    return mask & (of[:, None] == of) if documents else mask


def steps(group: Any, window: tuple[int, int], documents: bool, layout: str) -> tuple[list[float], list[Arrays], Arrays]:
    """The losses and gradients of ten steps of SGD, and the weights then; without ``group`` by a dense mask."""
    torch.set_grad_enabled(True)
    model = model_of(window)
    inner = [layer.attention.inner_attention for layer in model.layers.values()]
    for module in inner:
        module.layout = layout
    if group is None:
        mask = dense(window, documents)

        def attend(q: Any, k: Any, v: Any, **others: Any) -> Any:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True, scale=others["scale"]).transpose(1, 2)

        for module in inner:
            module.forward = attend
    else:
        cp: Any = importlib.import_module("torchtitan.distributed.context_parallel")
        mesh = dist.device_mesh.DeviceMesh.from_group(group, "cpu")
        cp.apply_cp_to_forward(inner, mesh)
    place = torch.arange(TOKENS)
    if documents:
        place = place - ENDS[torch.bucketize(place, ENDS[1:], right=True)]
    positions = place.expand(BATCH, -1)
    losses, gradients = [], []
    for step in range(10):
        ids = torch.randint(VOCAB, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(step))
        arrays, given = (ids[:, :-1], ids[:, 1:]), {}
        if group is not None:
            (*arrays, mine), masks = titan.cp_shard(mesh, arrays, positions, layout)
            given = {"positions": mine, "attention_masks": masks if documents else None}
        else:
            given = {"positions": positions, "attention_masks": None}
        loss = F.cross_entropy(model(arrays[0], **given).flatten(0, 1).float(), arrays[1].flatten(), reduction="sum")
        loss = loss / (BATCH * TOKENS)
        loss.backward()
        told = loss.detach().clone()
        if group is not None:
            dist.all_reduce(told, group=group)
            for p in model.parameters():
                dist.all_reduce(p.grad, group=group)
        losses.append(told.item())
        gradients.append({name: p.grad.numpy().copy() for name, p in model.named_parameters()})
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.05 * p.grad
                p.grad = None
    return losses, gradients, {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("window", "documents", "layout"),
    [((-1, 0), False, "zigzag"), ((-1, 0), True, "zigzag"), ((6, 0), True, "contiguous")],
    ids=["causal", "documents", "window, documents"],
)
def test_ten_steps_on_a_cp_axis_are_those_of_one_process(four: Any, window: Any, documents: bool, layout: str):
    losses, gradients, weights = steps(None, window, documents, layout)
    for got, got_gradients, got_weights in four(4, steps, window, documents, layout):
        assert np.abs(np.divide(got, losses) - 1).max() < 1e-5
        assert max(map(apart, got_gradients, gradients)) < 1e-5
        worst = {name: float(np.abs(got_weights[name] - x).max() / max(np.abs(x).max(), 1)) for name, x in weights.items()}
        assert {name: x for name, x in worst.items() if x > 1e-5} == {}


def sharded_by_heads(group: Any) -> tuple[float, Arrays]:
    """The loss and gradients of the first of ``steps``, with a window: two ranks along cp by two along tp."""
    torch.set_grad_enabled(True)
    ids = torch.randint(VOCAB, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(TOKENS).expand(BATCH, -1)
    parallel: Any = importlib.import_module("torchtitan.distributed.parallel_dims")
    settings = importlib.import_module("torchtitan.config").ParallelismConfig(
        context_parallel_degree=2, tensor_parallel_degree=2, data_parallel_shard_degree=1, spmd_backend="partial_dtensor"
    )
    dims = parallel.ParallelDims.from_config(settings, group.size())
    with patch.object(parallel, "device_type", "cpu"):
        dims.build_mesh()
    model = model_of((6, 0), settings)
    cp: Any = importlib.import_module("torchtitan.distributed.context_parallel")
    cp.apply_cp_to_forward([layer.attention.inner_attention for layer in model.layers.values()], dims.get_mesh("cp"))
    model.parallelize(dims)
    (tokens, labels, positions), _ = titan.cp_shard(dims.get_mesh("cp"), (ids[:, :-1], ids[:, 1:]), positions)
    logits = model(tokens, positions=positions, attention_masks=None)
    loss = F.cross_entropy(logits.full_tensor().flatten(0, 1).float(), labels.flatten(), reduction="sum") / (BATCH * TOKENS)
    loss.backward()
    told = loss.detach().clone()
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    for x in (told, *gradients.values()):
        dist.all_reduce(x, group=dims.get_mesh("cp").get_group())
    return told.item(), {name: x.numpy() for name, x in gradients.items()}


def test_tensor_parallelism_beside_the_cp_axis_leaves_losses_and_gradients(four: Any):
    losses, gradients, _ = steps(None, (6, 0), False, "zigzag")
    for got, got_gradients in four(4, sharded_by_heads):
        assert abs(got / losses[0] - 1) < 1e-5
        assert apart(got_gradients, gradients[0]) < 1e-5


def test_lse_is_handed_to_an_out_transform_as_gpt_oss_needs_it():
    inner = titan.RingInnerAttention.Config().build()
    q = torch.randn(1, 6, 2, 8)
    sinks = torch.tensor([0.3, -1.0])
    got = inner(q, q, q, out_transform=lambda out, lse: out * torch.sigmoid(lse - sinks)[..., None].to(out.dtype))
    scores = torch.einsum("bihd,bjhd->bhij", q, q) / 8**0.5
    scores = scores.masked_fill(torch.ones(6, 6).triu(1) > 0, -torch.inf)
    with_sink = torch.cat([scores, sinks[None, :, None, None].expand(1, 2, 6, 1)], -1).softmax(-1)[..., :-1]
    assert (got - torch.einsum("bhij,bjhd->bihd", with_sink, q)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"attention_masks": "a BlockMask"}, "takes attention_masks of ring_attn_torch.torchtitan.Documents"),
        ({"is_causal": False}, "takes no score_mod and no is_causal=False"),
    ],
)
def test_unsupported_arguments_are_refused_by_name(given: dict[str, Any], message: str):
    inner = titan.RingInnerAttention.Config().build()
    q = torch.randn(1, 6, 2, 8)
    with pytest.raises(ValueError, match=message):
        inner(q, q, q, **given)


@pytest.mark.parametrize("window", [20, (20,), (20, -2), (2.5, 0), None])
def test_a_window_that_is_not_two_numbers_of_tokens_is_refused(window: Any):
    with pytest.raises(ValueError, match=r"window_size must be two numbers of tokens, .* such as \(20, 0\)"):
        titan.RingInnerAttention.Config(window_size=window).build()


@pytest.mark.parametrize("layout", ["headtail", "balanced", None, 3])
def test_another_layout_is_refused_when_the_module_is_built(layout: Any):
    with pytest.raises(ValueError, match=r"layout of RingInnerAttention.Config is .*: choose .* \"headtail\" makes \"zigzag\""):
        titan.RingInnerAttention.Config(layout=layout).build()


IDS, POSITIONS = torch.ones(1, 32, dtype=torch.long), torch.arange(32)[None]


@pytest.mark.parametrize(
    ("inputs", "positions", "message"),
    [
        (IDS, POSITIONS, r"inputs as a tuple of tensors, .* got Tensor of shape \[1, 32\]"),
        ((IDS,), POSITIONS[0], r"positions \[batch, length\], got Tensor of shape \[32\]: add \[None\]"),
        ((IDS,), None, r"positions \[batch, length\], got None: they count from 0 in each document, or in each row"),
        ((IDS, IDS[:, :16]), POSITIONS, r"inputs\[1\] of cp_shard is \[1, 16\] and positions \[1, 32\]"),
        ((IDS,), POSITIONS.expand(2, -1), r"inputs\[0\] of cp_shard is \[1, 32\] and positions \[2, 32\]"),
        ((IDS[:, :31],), POSITIONS[:, :31], "31 tokens cannot be split into 4 equal parts"),
    ],
    ids=["no tuple", "a row of positions", "no positions", "a shorter input", "more rows of positions", "31 tokens"],
)
def test_arrays_that_cannot_be_sharded_together_are_refused(inputs: Any, positions: torch.Tensor, message: str):
    with pytest.raises(ValueError, match=message):
        titan.cp_shard(SimpleNamespace(size=lambda: 2, get_local_rank=lambda: 0), inputs, positions)


def test_torchtitans_trainer_before_the_documents_in_the_bases_is_refused():
    trainer: Any = importlib.import_module("torchtitan.trainer").Trainer
    mine = type("Mine", (trainer,), {})
    for first in (trainer, mine):
        with pytest.raises(ValueError, match=rf"put RingDocuments first: class Swapped\(RingDocuments, {first.__name__}\)"):
            type("Swapped", (first, titan.RingDocuments), {})
        assert type("Ordered", (titan.RingDocuments, first), {})


def test_a_load_balancer_that_no_ring_has_is_refused_by_name():
    class MyTrainer(titan.RingDocuments, importlib.import_module("torchtitan.trainer").Trainer):
        pass

    mine: Any = object.__new__(MyTrainer)
    mine.config = SimpleNamespace(parallelism=SimpleNamespace(context_parallel_load_balancer="ptrr"))
    mine.parallel_dims = SimpleNamespace(cp_enabled=True, get_mesh=lambda name: SimpleNamespace(size=lambda: 2))
    mine.model_config = None
    for batch in ({"input": IDS, "positions": POSITIONS}, {"input": IDS}):
        with pytest.raises(ValueError, match="context_parallel_load_balancer is 'ptrr', and a ring takes \"headtail\" or None"):
            mine.post_dataloading_process(batch, IDS)
