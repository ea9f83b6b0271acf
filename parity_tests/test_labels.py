"""A label outside the vocabulary on one rank: no rank waits for another, and all of them notice."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P

import ring_attn_jax
import ring_attn_torch

from .jax.ring import mesh_of
from .support.selection import first
from .support.spawn import PerRank

VOCAB, DIM, TOKENS = 11, 8, 6
WRONG = (-1, 11, -5, 2**31 - 1)

of_each_input = pytest.mark.parametrize("chunked", [False, True], ids=["logits", "hidden"])


def arrays() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """hidden [1, TOKENS, DIM], head [VOCAB, DIM] and labels [1, TOKENS], of which one is ignored."""
    rng = np.random.default_rng(0)
    hidden, head = (rng.standard_normal(shape).astype(np.float32) for shape in ((1, TOKENS, DIM), (VOCAB, DIM)))
    labels = rng.integers(0, VOCAB, (1, TOKENS)).astype(np.int32)
    labels[0, 1] = -100
    return hidden, head, labels


def spoiled(label: int) -> np.ndarray:
    labels = arrays()[2]
    labels[0, TOKENS - 1] = label  # of the last rank
    return labels


def torch_loss(labels: np.ndarray, chunked: bool, group: Any = None, reduction: str = "mean") -> list[Any]:
    """The loss and its gradients."""
    rank, ranks = (0, 1) if group is None else (torch.distributed.get_rank(group), torch.distributed.get_world_size(group))
    hidden, head, _ = (torch.from_numpy(x).requires_grad_(x.dtype == np.float32) for x in arrays())
    x, y = hidden.chunk(ranks, 1)[rank], torch.from_numpy(labels).chunk(ranks, 1)[rank]
    given = {"head": head, "chunk": 2} if chunked else {}
    value = ring_attn_torch.loss(x if chunked else x @ head.T, y, group=group, reduction=reduction, **given)
    return [value, *torch.autograd.grad(value, (hidden, head))]


@of_each_input
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("label", WRONG)
def test_torch_raises_the_same_error_on_every_rank(gloo, label, reduction, chunked):
    words = f"labels hold {label}, and a vocabulary of 11 has 0 to 10"
    gloo.refuse(f"^rank 1: {words}", 2, torch_loss_of, label, reduction, chunked)
    with pytest.raises(ValueError, match=f"^labels hold {label}, and a vocabulary"):
        torch_loss(spoiled(label), chunked)


def torch_loss_of(group: Any, label: int, reduction: str, chunked: bool) -> None:
    torch_loss(spoiled(label), chunked, group, reduction)


@of_each_input
def test_torch_goes_on_after_the_error(gloo, chunked):
    losses = gloo(2, raised_then_computed, chunked)
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(torch_loss(arrays()[2], chunked)[0].item(), rel=1e-6)


def raised_then_computed(group: Any, chunked: bool) -> float:
    with pytest.raises(ValueError, match="labels hold 11"):
        torch_loss(spoiled(11), chunked, group)
    return torch_loss(arrays()[2], chunked, group)[0].item()


@of_each_input
def test_torch_makes_the_loss_and_its_gradients_nan_where_it_cannot_raise(gloo, chunked):
    for found in gloo(2, unraised, PerRank(*(spoiled(11),) * 2), chunked):
        assert all(np.isnan(x).any() for x in found)


def unraised(group: Any, labels: np.ndarray, chunked: bool) -> list[np.ndarray]:
    """As on a GPU."""
    from ring_attn_torch.training import loss

    original, loss.eager_only = loss.eager_only, lambda tensors: False  # type: ignore[assignment]
    try:
        return [x.detach().numpy() for x in torch_loss(labels, chunked, group)]
    finally:
        loss.eager_only = original


@of_each_input
@pytest.mark.parametrize("label", first(WRONG, 1, 2))
def test_jax_makes_the_loss_and_its_gradients_nan_on_every_rank(label, chunked):
    def total(hidden: Any, head: Any, labels: Any) -> Any:
        given = {"head": head, "chunk": 2} if chunked else {}
        return ring_attn_jax.loss(hidden if chunked else hidden @ head.T, labels, **given)

    specs = P(None, "seq"), P(), P(None, "seq")
    on_ranks = jax.shard_map(total, mesh=mesh_of(2), in_specs=specs, out_specs=P())
    hidden, head, labels = map(jnp.asarray, arrays())
    for function in (on_ranks, lambda *given: ring_attn_jax.loss(given[0] @ given[1].T, given[2], axis_name=None)):
        graded = jax.jit(jax.value_and_grad(function, (0, 1)))
        value, (_, dhead) = graded(hidden, head, jnp.asarray(spoiled(label)))
        assert np.isnan(value)
        assert np.isnan(dhead).any()
        value, gradients = graded(hidden, head, labels)
        assert np.isfinite(value) and all(np.isfinite(x).all() for x in gradients)
