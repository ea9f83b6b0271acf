"""The loss with weights of labels: exact, on rings and in chunks, and its errors on every rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from ..support.losses import exact_loss, hidden_states
from ..support.selection import first, grid
from .test_losses import HIDDEN, ONE, check_near, of_hidden, of_logits

CASES = first([(1, "mean"), (2, "mean"), (2, "sum"), (4, "mean")], 3)


def drawn(reduction: str, dtype: Any = np.float64) -> tuple[np.ndarray, ...]:
    """hidden, head, labels, and weights: a third is 0, some are negative for a sum, and NaN stands beside ignored labels."""
    hidden, head, labels = hidden_states(dtype)
    rng = np.random.default_rng(7)
    weights = np.exp(rng.standard_normal(labels.shape)) * (rng.random(labels.shape) > 0.3) * 0.01
    if reduction == "sum":
        weights *= rng.choice([-1, 1], labels.shape)
    return hidden, head, labels, np.where(labels == -100, np.nan, weights).astype(dtype)


def loss_of(framework: Any, chunk: int | None, **options: Any) -> Any:
    """Return the loss of hidden states in chunks or, without a chunk, of logits."""
    return partial(of_hidden if chunk else of_logits, framework.loss, chunk=chunk or 7, **options)


def alone(framework: Any, chunk: int | None, hidden: Any, head: Any, labels: Any, weights: Any) -> Any:
    given = framework.arrays({"labels": labels, "label_weights": weights})
    return framework.pull(loss_of(framework, chunk, **given, **framework.no_ring), [hidden, head])


@pytest.mark.parametrize(("ranks", "reduction", "chunk"), [*grid(CASES[1::2], [7]), *grid(CASES[::2], [None])])
def test_labels_are_weighed_exactly_in_float64(framework, ranks, reduction, chunk):
    hidden, head, labels, weights = drawn(reduction)
    given = {"labels": labels, "label_weights": weights}
    got = framework.over_ring(ranks, loss_of(framework, chunk, reduction=reduction), [hidden], [head], ONE, **given)
    check_near(got, HIDDEN, exact_loss(hidden, head, labels, reduction, weights))


@pytest.mark.parametrize("chunk", [7, None])
def test_weights_are_constants_and_weights_of_one_change_nothing(framework, chunk):
    hidden, head, labels = hidden_states(np.float32)
    ones = np.ones(labels.shape, np.float32)
    of_weights = lambda weights: loss_of(framework, chunk, labels=framework.array(labels), **framework.no_ring)(
        framework.array(hidden), framework.array(head), label_weights=weights
    )
    plain, _ = framework.pull(loss_of(framework, chunk, labels=framework.array(labels), **framework.no_ring), [hidden, head])
    assert framework.numpy(of_weights(framework.array(ones))) == pytest.approx(plain[0], rel=1e-6)
    assert framework.is_constant(of_weights, ones)


@pytest.mark.parametrize("chunk", [7, None])
def test_a_mean_of_weights_whose_sum_is_0_is_0_without_nan(framework, chunk):
    hidden, head, labels = hidden_states(np.float32)
    (value,), gradients = alone(framework, chunk, hidden, head, labels, np.zeros(labels.shape, np.float32))
    assert not value and not any(x.any() for x in gradients)


@pytest.mark.parametrize("chunk", [7, None])
def test_a_negative_weight_of_a_mean_is_nan_where_it_cannot_raise(framework, monkeypatch, chunk):
    hidden, head, labels, weights = drawn("mean", np.float32)
    weights[tuple(np.argwhere(labels != -100)[0])] = -1
    if framework.name == "torch":
        monkeypatch.setattr("ring_attn_torch.training.loss.eager_only", lambda tensors: False)  # as on a GPU
    (value,), gradients = alone(framework, chunk, hidden, head, labels, weights)
    assert all(np.isnan(x).any() for x in (value, *gradients))


@pytest.mark.parametrize("weight", [-0.5, np.nan, np.inf])
def test_torch_refuses_a_weight_by_which_no_mean_divides_on_every_rank(gloo, weight):
    from ..torch.framework import Torch

    hidden, head, labels, weights = drawn("mean")
    row, token = np.argwhere(labels[:, 20:] != -100)[0]
    weights[row, 20 + token] = weight  # of rank 1
    message = f'rank 1: label_weights hold {weight}, and the weights of reduction="mean" must be'
    Torch(lambda: gloo).refuses(message, 2, partial(weighed, head), hidden, labels, weights)


def weighed(head: Any, hidden: Any, labels: Any, weights: Any, **ring: Any) -> Any:
    from ring_attn_torch import loss

    return loss(hidden, labels, head=hidden.new_tensor(head), label_weights=weights, chunk=7, **ring)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.ones((2, 39)), r"label_weights must be \[2, 40\], one for each label, got \[2, 39\]: both are this rank's shard"),
        (3, "label_weights must be .*, got 3"),
    ],
)
def test_weights_that_do_not_fit_are_refused(framework, weights, message):
    hidden, head, labels, _ = drawn("mean")
    with pytest.raises(ValueError, match=message):
        alone(framework, 7, hidden, head, labels, weights)
