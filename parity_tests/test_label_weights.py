"""The loss with weights of labels: exact in both frameworks, on rings and in chunks, and its errors on every rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from .support.losses import exact_loss, hidden_states
from .support.models import Arrays, assert_near
from .support.spawn import PerRank

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

import jax.numpy as jnp  # noqa: E402

import ring_attn_jax  # noqa: E402
import ring_attn_torch  # noqa: E402

from .jax.models import REPLICATED  # noqa: E402
from .jax.ring import SEQ, mesh_of  # noqa: E402

CASES = [(1, "mean"), (2, "mean"), (2, "sum"), pytest.param(4, "mean", marks=pytest.mark.exhaustive)]
PARTS = ("loss", "dhidden", "dhead")


def drawn(reduction: str, dtype: Any = np.float64) -> tuple[np.ndarray, ...]:
    """hidden, head, labels, and weights: a third is 0, some are negative for a sum, and NaN stands beside ignored labels."""
    hidden, head, labels = hidden_states(dtype)
    rng = np.random.default_rng(7)
    weights = np.exp(rng.standard_normal(labels.shape)) * (rng.random(labels.shape) > 0.3) * 0.01
    if reduction == "sum":
        weights *= rng.choice([-1, 1], labels.shape)
    return hidden, head, labels, np.where(labels == -100, np.nan, weights).astype(dtype)


def exact(reduction: str, dtype: Any = np.float64) -> Arrays:
    hidden, head, labels, weights = drawn(reduction, dtype)
    return {name: x for name, x in exact_loss(hidden, head, labels, reduction, weights).items() if name in PARTS}


def torch_parts(hidden: Any, head: Any, labels: Any, weights: Any, chunk: int | None, **options: Any) -> Arrays:
    leaves = [torch.as_tensor(x).requires_grad_() for x in (hidden, head)]
    of = {"labels": torch.as_tensor(labels), "label_weights": torch.as_tensor(weights), "chunk": chunk or 7} | options
    value = ring_attn_torch.loss(leaves[0] if chunk else leaves[0] @ leaves[1].T, **of | ({"head": leaves[1]} if chunk else {}))
    return dict(zip(PARTS, (x.detach().numpy() for x in (value, *torch.autograd.grad(value, leaves))), strict=True))


@pytest.mark.parametrize(("ranks", "reduction"), CASES)
def test_torch_weighs_labels_exactly_in_float64(gloo, ranks, reduction):
    hidden, head, labels, weights = drawn(reduction)
    shards = [PerRank(*np.split(x, ranks, 1)) for x in (hidden, labels, weights)]
    for mine in zip(*gloo(ranks, torch_on_rank, *shards, head, reduction), strict=True):
        assert len({float(each["loss"]) for each in mine}) == 1
        dhidden, dhead = np.concatenate([each["dhidden"] for each in mine], 1), np.sum([each["dhead"] for each in mine], 0)
        assert_near({"loss": mine[0]["loss"], "dhidden": dhidden, "dhead": dhead}, exact(reduction), 1e-14)


def torch_on_rank(group: Any, hidden: Any, labels: Any, weights: Any, head: Any, reduction: str) -> list[Arrays]:
    """By chunks of hidden states, and by logits."""
    return [torch_parts(hidden, head, labels, weights, chunk, reduction=reduction, group=group) for chunk in (7, None)]


def jax_loss(hidden: Any, head: Any, labels: Any, weights: Any, chunk: int | None, **options: Any) -> Any:
    if chunk:
        return ring_attn_jax.loss(hidden, labels, label_weights=weights, head=head, chunk=chunk, **options)
    return ring_attn_jax.loss(hidden @ head.T, labels, label_weights=weights, **options)


@pytest.mark.pairs
@pytest.mark.parametrize("chunk", [7, None])
@pytest.mark.parametrize(("ranks", "reduction"), CASES)
def test_jax_weighs_labels_exactly_in_float64(ranks, reduction, chunk):
    with jax.enable_x64(True):
        step = jax.value_and_grad(partial(jax_loss, chunk=chunk, reduction=reduction), (0, 1))
        specs = (SEQ, REPLICATED, SEQ, SEQ), (REPLICATED, (SEQ, REPLICATED))
        ring = jax.shard_map(step, mesh=mesh_of(ranks), in_specs=specs[0], out_specs=specs[1])
        value, gradients = jax.jit(ring)(*map(jnp.asarray, drawn(reduction)))
        assert_near(dict(zip(PARTS, map(np.asarray, (value, *gradients)), strict=True)), exact(reduction), 1e-14)


def test_jax_weighs_labels_of_whole_arrays_on_a_mesh():
    given = [jnp.asarray(x) for x in drawn("mean", np.float32)]
    mesh = jax.make_mesh((2, 4), ("data", "seq"))
    for where in ({"mesh": mesh, "batch_axes": "data", "chunk": 3}, {"axis_name": None, "chunk": 16}):
        with jax.set_mesh(mesh):
            value, gradients = jax.jit(jax.value_and_grad(partial(jax_loss, **where), (0, 1)))(*given)
        assert_near(dict(zip(PARTS, map(np.asarray, (value, *gradients)), strict=True)), exact("mean", np.float32), 1e-6)


def test_weights_are_constants_and_weights_of_one_are_no_weights():
    hidden, head, labels, _ = drawn("mean", np.float32)
    ones = np.ones(labels.shape, np.float32)
    plain = ring_attn_torch.loss(torch.tensor(hidden), torch.tensor(labels), head=torch.tensor(head))
    weights = torch.tensor(ones, requires_grad=True)
    leaf = torch.tensor(hidden, requires_grad=True)
    weighted = ring_attn_torch.loss(leaf, torch.tensor(labels), head=torch.tensor(head), label_weights=weights)
    assert torch.autograd.grad(weighted, weights, allow_unused=True) == (None,)
    assert weighted.item() == pytest.approx(plain.item(), rel=1e-6)
    given = [jnp.asarray(x) for x in (hidden, head, labels)]
    objective = lambda weights: jax_loss(given[0], given[1], given[2], weights, 7, axis_name=None)
    value, dweights = jax.value_and_grad(objective)(jnp.asarray(ones))
    assert float(value) == pytest.approx(plain.item(), rel=1e-6)
    assert not dweights.any()


@pytest.mark.parametrize("chunk", [7, None])
def test_a_mean_of_weights_whose_sum_is_0_is_0_without_nan(chunk):
    hidden, head, labels, _ = drawn("mean", np.float32)
    parts = torch_parts(hidden, head, labels, np.zeros(labels.shape), chunk)
    assert not any(x.any() for x in parts.values())
    value, gradients = jax.value_and_grad(partial(jax_loss, chunk=chunk, axis_name=None), (0, 1))(
        *map(jnp.asarray, (hidden, head, labels, np.zeros(labels.shape, np.float32)))
    )
    assert not value and not any(x.any() for x in gradients)


@pytest.mark.parametrize("weight", [-0.5, np.nan, np.inf])
def test_torch_refuses_a_weight_by_which_no_mean_divides_on_every_rank(gloo, weight):
    _, _, labels, weights = drawn("mean")
    row, token = np.argwhere(labels[:, 20:] != -100)[0]
    weights[row, 20 + token] = weight  # of rank 1
    outcomes = gloo.outcomes(2, torch_negative, PerRank(*np.split(weights, 2, 1)))
    assert [type(outcome) for outcome in outcomes] == [ValueError, ValueError], outcomes
    assert str(outcomes[0]) == str(outcomes[1])
    assert str(outcomes[0]).startswith(f'rank 1: label_weights hold {weight}, and the weights of reduction="mean" must be')


def torch_negative(group: Any, weights: np.ndarray) -> None:
    hidden, head, labels, _ = drawn("mean")
    rank = torch.distributed.get_rank(group)
    torch_parts(*(hidden[:, rank::2], head), np.split(labels, 2, 1)[rank], weights, 7, group=group)


@pytest.mark.parametrize("chunk", [7, None])
def test_a_negative_weight_of_a_mean_is_nan_where_it_cannot_raise(monkeypatch, chunk):
    from ring_attn_torch.training import loss

    hidden, head, labels, weights = drawn("mean", np.float32)
    weights[tuple(np.argwhere(labels != -100)[0])] = -1
    monkeypatch.setattr(loss, "eager_only", lambda tensors: False)  # as on a GPU
    assert all(np.isnan(x).any() for x in torch_parts(hidden, head, labels, weights, chunk).values())
    value, gradients = jax.value_and_grad(partial(jax_loss, chunk=chunk, axis_name=None), (0, 1))(
        *map(jnp.asarray, (hidden, head, labels, weights))
    )
    assert all(np.isnan(x).any() for x in (value, *gradients))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones((2, 39)), r"label_weights must be \[2, 40\], one for each label, got \[2, 39\]: both are this rank's shard"),
        (3, "label_weights must be .*, got 3"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weights, message):
    hidden, head, labels, _ = drawn("mean")
    given: Any = torch.as_tensor(weights) if isinstance(weights, np.ndarray) else weights
    with pytest.raises(ValueError, match=message):
        ring_attn_torch.loss(torch.as_tensor(hidden), torch.as_tensor(labels), head=torch.as_tensor(head), label_weights=given)
    with pytest.raises(ValueError, match=message):
        jax_loss(hidden, head, labels, weights, 7, axis_name=None)
