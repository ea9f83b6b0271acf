"""``order="global"`` of JAX: the same bits on any number of devices and in any layout."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ring_attn_core import causal
from ring_attn_jax import RingTransformer, TracedLayout, attention_fn, loss, sharded_ring_attention

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
from ..support.selection import first, one_in
from .models import REPLICATED, run_layer
from .ring import SEQ, mesh_of, run, run_once


@pytest.mark.parametrize("case", first(ORDERED.values(), 1), ids=ORDERED)
def test_results_have_the_same_bits_on_1_2_and_3_ranks(case):
    check_bits(case, run, RINGS[:2])


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", list(ORDERED.values())[:3], ids=list(ORDERED)[:3])
def test_results_have_the_same_bits_on_up_to_8_ranks_in_every_layout(case):
    check_bits(case, run_once, MORE_RINGS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["documents in a window", "tiles of users"])
def test_programs_compiled_as_users_compile_them_have_the_same_bits(name):
    check_bits(ORDERED[name], partial(run.__wrapped__, quick=False), RINGS)


@pytest.mark.parametrize("case", one_in(16, TWO_FEATURES), ids=str)
def test_any_two_features_together_have_the_same_bits_on_every_ring(case):
    check_bits(case, run_once)


@pytest.mark.exhaustive
def test_balanced_layouts_have_the_bits_of_one_rank():
    check_bits(BALANCED, run_once, BALANCED_RINGS)


@pytest.mark.exhaustive
def test_other_documents_of_the_row_change_no_bit():
    check_other_documents(run.__wrapped__, ranks=3, layout="zigzag")


@pytest.mark.exhaustive
def test_sharded_attention_has_the_bits_of_one_device():
    q, k = (jax.random.normal(jax.random.key(i), (2, 16, heads, 8)) for i, heads in enumerate((4, 2)))
    results = [
        sharded_ring_attention(q, k, k, mesh=mesh_of(ranks), layout="contiguous", order="global", return_lse=True)
        for ranks in (1, 2, 4)
    ]
    for pair in results[1:]:
        for got, expected in zip(pair, results[0], strict=True):
            np.testing.assert_array_equal(got, expected)


def test_attention_in_flax_has_the_bits_of_one_device():
    q, k = (jax.random.normal(jax.random.key(i), (2, 23, 4, 8)) for i in range(2))
    one, three = (attention_fn(mesh=mesh_of(ranks), mask=causal(), order="global")(q, k, k) for ranks in (1, 3))
    np.testing.assert_array_equal(one, three)


def test_a_traced_layout_is_refused():
    q, layout = jnp.zeros((1, 61, 2, 4)), TracedLayout.of(BALANCED.layout)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r'order="global" does not run a TracedLayout: pass the shard\.layout'):
        sharded_ring_attention(q, q, q, mesh=mesh_of(1), layout=layout, order="global")


def test_a_layer_has_the_same_bits_on_1_and_2_ranks():
    x, dout = layer_data()
    one, two = (
        run_layer(selections(), x, dout, ranks, {"layout": "zigzag", "order": "global"}, whole=ranks == 2) for ranks in (1, 2)
    )
    assert one["out"].tobytes() == two["out"].tobytes()
    assert one["dx"].tobytes() == two["dx"].tobytes()


def loss_and_gradient(ranks, shards, weighted):
    value = lambda x, labels, weights: loss(x, labels, label_weights=weights if weighted else None, order="global")
    specs: dict[str, Any] = {"in_specs": (SEQ, SEQ, SEQ), "out_specs": (REPLICATED, SEQ)}
    return jax.jit(jax.shard_map(jax.value_and_grad(value), mesh=mesh_of(ranks), **specs))(*shards)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_loss_has_the_same_bits_on_1_2_and_4_ranks(weighted):
    """XLA may round exponentials of shards of another shape otherwise: jax 0.10.1 does, so there only rounding is checked."""
    values, gradients = [], []
    for ranks, layout in IN_LOSS:
        shards, order = loss_data(ranks, layout)
        value, gradient = loss_and_gradient(ranks, shards, weighted)
        values.append(float(value))
        gradients.append(np.asarray(gradient)[:, np.argsort(order)])
        np.testing.assert_allclose(gradients[-1], gradients[0], rtol=1e-5, atol=1e-9)
    apart = 0 if jax.__version_info__ >= (0, 10, 2) else 1e-6
    assert all(abs(value / values[0] - 1) <= apart for value in values)
    (logits, labels, weights), _ = loss_data(1, "contiguous")
    truth = exact_loss(logits, np.eye(logits.shape[-1]), labels, weights=weights if weighted else None)["loss"]
    assert abs(values[0] / truth - 1) < 1e-6


@pytest.mark.parametrize("scale", [-0.1, 1e-16, 1e18])
def test_a_sum_in_global_order_is_exact_for_weights_of_any_sign_and_size(scale):
    logits, labels, weights = map(jnp.asarray, loss_data(1, "contiguous")[0])
    summed = partial(loss, logits, labels, label_weights=scale * weights, reduction="sum", axis_name=None)
    assert abs(summed(order="global") / summed(order="ring") - 1) < 1e-6


def test_what_cannot_keep_the_order_is_refused_by_name():
    with pytest.raises(ValueError, match='order must be "ring" or "global", got \'up\''):
        loss(jnp.zeros((1, 4, 8)), jnp.zeros((1, 4), int), axis_name=None, order="up")
    sizes: dict[str, Any] = {
        "vocab": 5,
        "dim": 8,
        "depth": 1,
        "heads": 2,
        "mesh": mesh_of(1),
        "order": "global",
        "rngs": nnx.Rngs(0),
    }
    with pytest.raises(ValueError, match=r'Mamba2 carries a state .* cannot keep order="global"'):
        RingTransformer(**sizes, mixers=["mamba2"])
    with pytest.raises(ValueError, match='prefill and decoding cannot keep order="global"'):
        RingTransformer(**sizes).generate([[1, 2]], 1)
