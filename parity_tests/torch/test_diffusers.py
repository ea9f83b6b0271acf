"""diffusers' models on rings of its context parallelism: outputs and gradients of one device, with masks and unequal shards."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import ring_attn_torch.diffusers as backend
from ring_attn_torch import sum_gradients

from ..support.models import apart

diffusers: Any = importlib.import_module("diffusers")

pytestmark = pytest.mark.slow


def flux(tokens: int) -> tuple[Any, dict[str, Any]]:
    """A small Flux, and its arguments: text and image tokens attend to one another."""
    torch.manual_seed(0)
    sizes = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 4}
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8], **sizes
    )
    given = {
        "hidden_states": torch.randn(2, tokens, 4),
        "encoder_hidden_states": torch.randn(2, tokens // 2, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([1.0, 0.3]),
        "img_ids": torch.randn(tokens, 3),
        "txt_ids": torch.zeros(tokens // 2, 3),
    }
    return model, given


def qwen(tokens: int) -> tuple[Any, dict[str, Any]]:
    """A small Qwen-Image, whose text has padding."""
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4, "axes_dims_rope": (4, 6, 6)}
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, joint_attention_dim=16, guidance_embeds=False, **sizes
    )
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, 5:] = False
    given = {
        "hidden_states": torch.randn(2, 16, 16),
        "encoder_hidden_states": torch.randn(2, 8, 16),
        "encoder_hidden_states_mask": mask,
        "timestep": torch.tensor([1.0, 0.3]),
        "img_shapes": [[(1, 4, 4)], [(1, 4, 4)]],
    }
    return model, given


def ltx(tokens: int) -> tuple[Any, dict[str, Any]]:
    """A small LTX-Video, whose video attends to shards of a padded text: other lengths, and masks of -10,000 for each head."""
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 4, "cross_attention_dim": 64}
    model = diffusers.LTXVideoTransformer3DModel(in_channels=4, out_channels=4, caption_channels=16, **sizes)
    mask = torch.ones(2, 8)
    mask[1, 3:] = 0
    given = {
        "hidden_states": torch.randn(2, tokens, 4),
        "encoder_hidden_states": torch.randn(2, 8, 16),
        "encoder_attention_mask": mask,
        "timestep": torch.tensor([1000.0, 300.0]),
        "num_frames": 2,
        "height": tokens // 8,
        "width": 4,
    }
    return model, given


class Trained(NamedTuple):
    """The output of the first step, and of every step the loss and the gradients, summed over the ranks."""

    out: np.ndarray
    losses: list[float]
    gradients: list[dict[str, np.ndarray]]


def trained(group: Any, make: Any, tokens: int, degrees: dict[str, Any]) -> Trained:
    """Ten steps of AdamW towards random targets, each with other noise."""
    torch.set_grad_enabled(True)
    model, given = make(tokens)
    if group is not None:
        model.set_attention_backend("ring")
        with patch("torch.accelerator.device_count", lambda: 1):  # by which diffusers divides, 0 on a CPU
            model.enable_parallelism(config=diffusers.ContextParallelConfig(**degrees))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)  # of rounding a smaller eps makes steps
    outs, losses, gradients = [], [], []
    for step in range(10):
        generator = torch.Generator().manual_seed(step)
        noise = torch.randn(given["hidden_states"].shape, generator=generator)
        out = model(**given | {"hidden_states": given["hidden_states"] + noise}, return_dict=False)[0]
        loss = F.mse_loss(out, torch.randn(out.shape, generator=generator))
        loss.backward()
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if group is not None:
            sum_gradients(model, group)
        outs.append(out.detach().numpy())
        losses.append(loss.item())
        gradients.append({name: p.grad.numpy().copy() for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return Trained(outs[0], losses, gradients)


@pytest.mark.parametrize(
    ("make", "tokens", "degrees"),
    [
        (flux, 24, {"ring_degree": 4}),
        (flux, 24, {"ring_degree": 2, "ulysses_degree": 2}),
        (qwen, 16, {"ring_degree": 4}),
        (qwen, 16, {"ulysses_degree": 4}),
        (ltx, 32, {"ring_degree": 4}),
    ],
    ids=["flux", "flux, ulysses in a ring", "qwen, padded text", "qwen, ulysses", "ltx, shards of padded text"],
)
def test_ten_steps_of_a_model_on_a_ring_are_those_of_one_device(four: Any, make: Any, tokens: int, degrees: dict[str, Any]):
    one = trained(None, make, tokens, {})
    for got in four(4, trained, make, tokens, degrees):
        assert got.out.shape == one.out.shape
        assert np.abs(got.out - one.out).max() < 1e-5 * np.abs(one.out).max()
        assert np.abs(np.divide(got.losses, one.losses) - 1).max() < 1e-5
        assert max(map(apart, got.gradients, one.gradients)) < 1e-5


def parallel_config(group: Any, **degrees: Any) -> Any:
    """Such a config of diffusers for ``group``; None is a ring of one."""
    config = diffusers.ContextParallelConfig(**degrees)
    config._flattened_mesh = type("Mesh", (), {"get_group": lambda _: group})()  # type: ignore[assignment]
    return type("Parallel", (), {"context_parallel_config": config})


def unequal(group: Any, masked: bool) -> dict[str, float]:
    """Return how far out and gradients of shards of 6, 6, 5 and 5 tokens are from one device's. Their gather needs NCCL."""
    torch.set_grad_enabled(True)
    torch.manual_seed(1)
    rank, ranks = group.rank(), group.size()
    whole = [torch.randn(2, 22, 4, 8, requires_grad=True) for _ in range(3)]
    mask = torch.rand(2, 22) < 0.7
    weights = torch.randn(2, 22, 4, 8)
    heads_first = [x.transpose(1, 2) for x in whole]
    alone = F.scaled_dot_product_attention(*heads_first, attn_mask=mask[:, None, None] if masked else None).transpose(1, 2)
    (alone * weights).sum().backward()
    mine = lambda x: x.detach().tensor_split(ranks, 1)[rank].clone()
    shards = [mine(x).requires_grad_() for x in whole]
    parallel = parallel_config(group, ring_degree=ranks, ring_anything=True)
    bias = torch.zeros(2, 22).masked_fill(~mask, -torch.inf)
    out: Any = backend.ring_backend(*shards, attn_mask=mine(bias) if masked else None, _parallel_config=parallel)
    (out * mine(weights)).sum().backward()
    off = {"out": (out - mine(alone)).abs().max()}
    for name, x, shard in zip("qkv", whole, shards, strict=True):
        off[name] = (shard.grad - mine(x.grad)).abs().max()  # type: ignore[operator, arg-type]
    return {name: x.item() for name, x in off.items()}


@pytest.mark.parametrize("masked", [False, True])
def test_shards_of_unequal_lengths_are_exact(four: Any, masked: bool):
    for off in four(4, unequal, masked):
        assert {name: x for name, x in off.items() if x > 1e-5} == {}


def crossed(group: Any, whole: bool, anything: bool) -> dict[str, float]:
    """Return how far shards of 6, 6, 5 and 5 queries are from one device's. Ranks hold 3, 3, 2 and 2 keys or all 10."""
    torch.set_grad_enabled(True)
    torch.manual_seed(1)
    rank, ranks = group.rank(), group.size()
    queries, keys = (22, 10) if anything else (24, 8)
    q, k, v = (torch.randn(2, n, 4, 8, requires_grad=True) for n in (queries, keys, keys))
    visible = torch.rand(2, keys) < 0.7
    alone = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), attn_mask=visible[:, None, None]).transpose(
        1, 2
    )
    weights = torch.randn(alone.shape)
    (alone * weights).sum().backward()
    mine = lambda x: x.detach().tensor_split(ranks, 1)[rank].clone()
    own = lambda x: x.detach().clone() if whole else mine(x)
    shards = [mine(q).requires_grad_(), own(k).requires_grad_(), own(v).requires_grad_()]
    mask = own(visible)[:, None, None].expand(-1, 4, -1, -1)
    parallel = parallel_config(group, ring_degree=ranks, ring_anything=anything)
    out: Any = backend.ring_backend(*shards, attn_mask=mask, _parallel_config=parallel)
    (out * mine(weights)).sum().backward()
    if whole:
        for x in shards[1:]:
            torch.distributed.all_reduce(x.grad, group=group)
    off = {"out": (out - mine(alone)).abs().max(), "q": (shards[0].grad - mine(q.grad)).abs().max()}  # type: ignore[operator, arg-type]
    for name, x, shard in zip("kv", (k, v), shards[1:], strict=True):
        off[name] = (shard.grad - own(x.grad)).abs().max()  # type: ignore[operator, arg-type]
    return {name: x.item() for name, x in off.items()}


@pytest.mark.parametrize("anything", [False, True])
@pytest.mark.parametrize("whole", [False, True], ids=["shards of text", "whole text"])
def test_cross_attention_is_exact(four: Any, whole: bool, anything: bool):
    for off in four(4, crossed, whole, anything):
        assert {name: x for name, x in off.items() if x > 1e-5} == {}


def refused_alone(group: Any, anything: bool) -> str:
    """Return a rank's error if rank 1 has a mask that differs between queries."""
    x = torch.ones(2, 6, 2, 8)
    mask = torch.ones(2, 1, 6 if group.rank() == 1 else 1, 6) > 0
    try:
        backend.ring_backend(x, x, x, mask, _parallel_config=parallel_config(group, ring_degree=2, ring_anything=anything))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("anything", [False, True])
def test_a_mask_that_one_rank_refuses_is_refused_on_every_rank(four: Any, anything: bool):
    first, second = four(2, refused_alone, anything)
    assert first == second
    assert first.startswith('ValueError: rank 1: the attention backend "ring" takes attn_mask [2, 6]')


CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "causal": ({"is_causal": True}, "is_causal=True, and a shard of text and image tokens has no order"),
    "dropout": ({"dropout_p": 0.1}, "takes no dropout, got dropout_p=0.1"),
    "a mask by query": ({"attn_mask": torch.ones(2, 1, 6, 6) > 0}, r"takes attn_mask \[2, 6\] .* got \[2, 1, 6, 6\]"),
    "a mask longer than the shard": (
        {"attn_mask": torch.ones(2, 1, 1, 7) > 0},
        r"takes attn_mask \[2, 6\] .* got \[2, 1, 1, 7\]",
    ),
    "a mask of integers": ({"attn_mask": torch.ones(2, 6, dtype=torch.int64)}, "and no other biases, got torch.int64"),
    "a bias": ({"attn_mask": torch.full((2, 6), 0.5)}, "no other biases"),
    "a mask by head": ({"attn_mask": torch.eye(2)[None, :, None].repeat(2, 1, 1, 3) > 0}, r"got \[2, 2, 1, 6\]"),
    "heads": (
        {"_parallel_config": parallel_config(None, ulysses_degree=4)},
        "ulysses_degree=4 and 2 heads: pass a ulysses_degree",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_unsupported_arguments_are_refused_by_name(name: str):
    given, message = CALLS[name]
    x = torch.ones(2, 6, 2, 8)
    config = parallel_config(None, ring_degree=2)
    with pytest.raises(ValueError, match=message):
        backend.ring_backend(**{"query": x, "key": x, "value": x, "_parallel_config": config} | given)
