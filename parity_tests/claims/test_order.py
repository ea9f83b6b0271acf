"""``order="global"``: the same bits on any number of ranks and in any layout."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest

from ring_attn_core import causal, sliding_window

from ..support.caches import check_order
from ..support.losses import exact_loss
from ..support.models import layer_data
from ..support.orders import (
    BALANCED,
    BALANCED_RINGS,
    IN_LOSS,
    MORE_RINGS,
    ORDERED,
    RINGS,
    TWO_FEATURES,
    check_bits,
    check_other_documents,
    loss_data,
    selections,
)
from ..support.selection import first, in_each, one_in, one_of_each
from ..support.stories import ORDERED as STORIES
from .framework import library

CASES = [*ORDERED.values()]


@in_each("case,rings", jax=first([(case, RINGS[:2]) for case in CASES]), torch=[(case, RINGS) for case in CASES])
def test_results_have_the_same_bits_on_every_ring(framework, case, rings):
    check_bits(case, framework.attention, rings)


@in_each("case", jax=first(CASES[:3], 0), torch=first(CASES, 0))
def test_results_have_the_same_bits_on_up_to_8_ranks_in_every_layout(framework, case):
    check_bits(case, partial(framework.attention, once=True), MORE_RINGS)


@in_each("case", jax=one_in(16, TWO_FEATURES), torch=one_in(8, TWO_FEATURES))
def test_any_two_features_together_have_the_same_bits_on_every_ring(framework, case):
    check_bits(case, partial(framework.attention, once=True))


@in_each("case", jax=first([BALANCED], 0), torch=[BALANCED])
def test_balanced_layouts_have_the_bits_of_one_rank(framework, case):
    check_bits(case, partial(framework.attention, once=True), BALANCED_RINGS)


@in_each("ranks", jax=first([3], 0), torch=[3])
def test_other_documents_of_the_row_change_no_bit(framework, ranks):
    check_other_documents(partial(framework.attention, anew=True), ranks=ranks, layout="zigzag")


@in_each("rings", jax=[{1: "zigzag", 2: "zigzag"}], torch=[{1: "zigzag", 2: "zigzag", 3: "striped"}])
def test_a_layer_has_the_same_bits_on_every_ring(framework, rings):
    options = lambda layout: {"layout": layout, "order": "global"}
    call = lambda ranks, layout: framework.layer(selections(), *layer_data(), ranks, options(layout), whole=ranks == 2)
    first, *others = (call(*ring) for ring in rings.items())
    for got in others:
        assert all(got[name].tobytes() == first[name].tobytes() for name in ("out", "dx"))


@in_each("story", jax=first(STORIES[:-1], 1, 2), torch=one_of_each(2, STORIES), slow="jax")
def test_prefill_in_chunks_of_any_size_has_the_bits_of_the_training_forward(framework, story):
    mask = causal() if story.window is None else sliding_window(story.window)
    call = partial(framework.ring_attention, mask=mask, layout="contiguous", order="global")

    def forward(*qkv):
        shards = [framework.array(x, story.dtype) for x in qkv]
        return framework.over_ring(1, partial(call_with, call, story.features), shards)[0][0]

    check_order(story, framework.play(story), forward)


def call_with(call, features, q, k, v, **ring):
    constants = {name: library(q).asarray(x) if isinstance(x, np.ndarray) else x for name, x in features.items()}
    return call(q, k, v, **constants, **ring)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_loss_has_the_same_bits_on_1_2_and_4_ranks(framework, weighted):
    """XLA may round exponentials of shards of another shape otherwise: jax 0.10.1 does, so there only rounding is checked."""
    values, gradients, one = [], [], [np.ones((), np.float32)]
    for chunk, (ranks, layout) in enumerate(IN_LOSS, 5):
        (logits, labels, weights), order = loss_data(ranks, layout)
        given = {"labels": labels} | ({"label_weights": weights} if weighted else {})
        (value,), (gradient,) = framework.over_ring(
            ranks, partial(framework.loss, chunk=chunk, order="global"), [logits], cotangents=one, **given
        )
        values.append(float(value))
        gradients.append(gradient[:, np.argsort(order)])
    (logits, labels, weights), _ = loss_data(1, "contiguous")
    truth = exact_loss(logits, np.eye(logits.shape[-1]), labels, weights=weights if weighted else None)["loss"]
    assert abs(values[0] / truth - 1) < 1e-6
    if framework.name == "jax":
        apart = 0 if tuple(map(int, version("jax").split(".")[:3])) >= (0, 10, 2) else 1e-6
        assert all(abs(value / values[0] - 1) <= apart for value in values)
        for gradient in gradients[1:]:
            np.testing.assert_allclose(gradient, gradients[0], rtol=1e-5, atol=1e-9)
    else:
        assert len({*values}) == len({x.tobytes() for x in gradients}) == 1


@pytest.mark.parametrize("scale", [-0.1, 1e-16, 1e18])
def test_a_sum_in_global_order_is_exact_for_weights_of_any_sign_and_size(framework, scale):
    logits, labels, weights = map(framework.array, loss_data(1, "contiguous")[0])
    summed = partial(framework.loss, logits, labels, label_weights=scale * weights, reduction="sum", **framework.no_ring)
    assert abs(float(summed(order="global")) / float(summed(order="ring")) - 1) < 1e-6


def test_a_loss_of_hidden_states_in_global_order_is_exact(framework):
    rng = np.random.default_rng(0)
    hidden, head = rng.standard_normal((1, 33, 8)), rng.standard_normal((17, 8))
    labels = np.where(np.arange(33) < 5, -100, np.arange(33) % 17)[None].astype(np.int32)
    call = lambda x, head: framework.loss(x, framework.array(labels), head=head, chunk=7, order="global", **framework.no_ring)
    (got,), _ = framework.pull(call, [hidden, head])
    assert abs(got - exact_loss(hidden, head, labels)["loss"]) < 1e-14


def test_one_rank_computes_the_same_in_either_order(framework):
    q, k, v = map(framework.array, np.random.default_rng(0).standard_normal((3, 1, 10, 2, 8), np.float32))
    results = (framework.alone("ring_attention")(q, k, v, order=order) for order in ("ring", "global"))
    np.testing.assert_allclose(*map(framework.numpy, results), rtol=2e-6, atol=2e-6)


def test_models_and_generation_that_cannot_keep_the_order_are_refused_by_name(framework):
    logits, labels = map(framework.array, (np.zeros((1, 4, 8), np.float32), np.zeros((1, 4), np.int32)))
    with pytest.raises(ValueError, match='order must be "ring" or "global", got \'up\''):
        framework.loss(logits, labels, **framework.no_ring, order="up")
    sizes: dict[str, Any] = {"vocab": 5, "dim": 8, "depth": 1, "heads": 2, "order": "global", **framework.ring(1)}
    with pytest.raises(ValueError, match=r'Mamba2 carries a state .* cannot keep order="global"'):
        framework.make("RingTransformer", **sizes, mixers=["mamba2"])
    with pytest.raises(
        ValueError, match='decoding adds keys in the order of the ranks, so generation cannot keep order="global"'
    ):
        framework.make("RingTransformer", **sizes).generate([[1, 2]], 1)
