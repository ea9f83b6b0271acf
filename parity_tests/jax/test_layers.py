"""The flax layers: rotary embeddings and attention against float64, the loss against one device, weights to numpy and back."""

from __future__ import annotations

from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import ring_attn_jax
from ring_attn_core import Band, causal, full, sliding_window
from ring_attn_jax import from_layout, to_layout
from ring_attn_jax.layers.attention import RingAttention
from ring_attn_jax.layers.rotary import RotaryEmbedding
from ring_attn_jax.layers.transformer import RingTransformer
from ring_attn_jax.training.loss import loss
from ring_attn_jax.training.weights import from_numpy, to_numpy

from ..support.models import (
    LAYER,
    LENGTH,
    MIDDLE,
    TRANSFORMER,
    VOCAB,
    arguments_of_attention,
    assert_near,
    check_layer,
    layer_data,
    layer_pair,
    layer_weights,
    token_ids,
    token_pair,
    transformer_weights,
)
from ..support.selection import first
from .models import REPLICATED, packed_training, run_layer
from .ring import SEQ, mesh_of

ARGUMENTS = arguments_of_attention()


@pytest.mark.parametrize(
    ("ranks", "layout", "whole"),
    first([(2, "zigzag", False), (4, "zigzag", True), (3, "striped", False), (1, "zigzag", False)]),
)
def test_layer_over_a_ring_is_exact(ranks, layout, whole):
    x, dout = layer_data()
    check_layer(run_layer(layer_weights(), x, dout, ranks, {"layout": layout}, whole), layer_weights(), x, dout)


@pytest.mark.exhaustive
def test_layer_without_rotary_and_with_a_window_is_exact():
    x, dout = layer_data()
    arguments = {"rotary_base": None, "mask": sliding_window(6)}
    got = run_layer(layer_weights(), x, dout, 2, arguments)
    check_layer(got, layer_weights(), x, dout, **arguments)


@pytest.mark.parametrize(
    ("name", "ranks", "whole"),
    first([("everything", 2, False), ("everything", 4, True), *((name, 2, False) for name in [*ARGUMENTS][:-1])], 0, 2),
)
def test_every_argument_of_attention_over_a_ring_is_exact(name, ranks, whole):
    x, dout = layer_data()
    weights = layer_weights(sinks="sinks" in ARGUMENTS[name])
    check_layer(run_layer(weights, x, dout, ranks, ARGUMENTS[name], whole), weights, x, dout, **ARGUMENTS[name])


@pytest.mark.parametrize("counts", [(3, 0, 10, 1), (0, 0, 0, 0)])
def test_loss_over_ranks_with_uneven_labels_is_one_devices(counts):
    logits = np.random.default_rng(0).standard_normal((2, 40, VOCAB)).astype(np.float32)
    labels = np.full((2, 40), -100, np.int32)
    for rank, count in enumerate(counts):
        labels[1, rank * 10 : rank * 10 + count] = np.arange(count)
    whole = lambda logits: loss(logits, jnp.asarray(labels), axis_name=None)
    ring = jax.shard_map(loss, mesh=mesh_of(4), in_specs=(SEQ, SEQ), out_specs=REPLICATED)
    value, gradient = jax.jit(jax.value_and_grad(whole))(jnp.asarray(logits))
    ring_value, ring_gradient = jax.jit(jax.value_and_grad(ring))(jnp.asarray(logits), jnp.asarray(labels))
    np.testing.assert_allclose(ring_value, value, rtol=1e-6)
    np.testing.assert_allclose(ring_gradient, gradient, atol=1e-7)
    wide = logits.astype(np.float64)
    each = np.log(np.exp(wide).sum(-1)) - np.take_along_axis(wide, np.maximum(labels, 0)[..., None], -1)[..., 0]
    np.testing.assert_allclose(value, each[labels != -100].sum() / max(sum(counts), 1), rtol=1e-6)


def test_loss_of_bfloat16_logits_is_float32_and_a_label_outside_the_vocabulary_is_nan():
    logits = jnp.ones((1, 4, VOCAB), jnp.bfloat16)
    value = loss(logits, jnp.array([[1, 2, -100, 3]]), axis_name=None)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, np.log(VOCAB), rtol=1e-6)
    for wrong in (VOCAB, -1):
        assert np.isnan(loss(logits, jnp.array([[1, wrong, 2, 3]]), axis_name=None))


@pytest.mark.parametrize(
    ("mask", "sides", "windows"), first([(causal(), (0, 1), (3, 7)), (full(), (1, 1), (2, None)), (full(), (1, 1), (5, 0))], 0, 2)
)
def test_a_token_reaches_as_far_as_the_windows_of_the_layers(mask, sides, windows):
    before, after = sides
    limits = [LENGTH if window is None else window for window in windows]
    for reached, limit in zip(reached_by_the_middle(mask, windows), [*limits, sum(limits)], strict=True):
        first, last = max(MIDDLE - before * limit, 0), min(MIDDLE + after * limit, LENGTH - 1)
        np.testing.assert_array_equal(reached, np.arange(first, last + 1))


def reached_by_the_middle(mask: Band, windows: tuple[int | None, ...]) -> list[np.ndarray]:
    """Whom the token in the MIDDLE changes: in the attention of every layer by itself, and in the logits."""
    model = RingTransformer(**TRANSFORMER, mask=mask, windows=windows, mesh=mesh_of(2), rngs=nnx.Rngs(0))
    from_numpy(model, transformer_weights())
    reached = []
    for module, pair in [*((block.attention, layer_pair()) for block in model.blocks), (model, token_pair())]:
        shards = [to_layout(jnp.asarray(x), "zigzag", 2) for x in pair]
        program = jax.jit(lambda x, module=module: from_layout(module(x, length=LENGTH), "zigzag", 2, LENGTH))
        results = [program(x) for x in shards]
        reached.append(np.flatnonzero((results[0] != results[1]).any((0, 2))))
    return reached


@pytest.mark.exhaustive
def test_layers_and_batch_rows_draw_their_dropout_by_themselves():
    model = RingTransformer(**TRANSFORMER, layout="contiguous", dropout_rate=0.4, mesh=mesh_of(1), rngs=nnx.Rngs(0))
    ids = jnp.asarray(token_ids()[0])
    call = jax.jit(lambda ids, seed, offset: model(ids, dropout_seed=seed, dropout_offset=offset))
    logits = call(ids, 3, (0, 0))
    x, where = model.embed(ids), jnp.arange(LENGTH)
    for offset, block in zip([(0, 0), (0, 4)], model.blocks, strict=True):
        x = block(x, where, dropout_seed=3, dropout_offset=offset)
    np.testing.assert_allclose(logits, model.norm(x) @ model.embed.embedding[...].T, atol=1e-6)
    np.testing.assert_allclose(logits[1:], call(ids[1:], 3, (1, 0)), atol=1e-6)
    for other in (jax.jit(model)(ids), call(ids, 4, (0, 0)), call(ids, 3, (0, 1))):
        assert jnp.abs(other - logits).max() > 1e-4


def test_a_call_without_a_seed_is_evaluation():
    x, _ = layer_data()
    layers = [RingAttention(**LAYER, dropout_rate=rate, mesh=mesh_of(1), rngs=nnx.Rngs(0)) for rate in (0.0, 0.4)]
    without, with_rate = (layer(jnp.asarray(x[:, :36])) for layer in layers)
    np.testing.assert_array_equal(with_rate, without)
    assert (layers[1](jnp.asarray(x[:, :36]), dropout_seed=3) != without).any()


@pytest.mark.exhaustive
def test_packed_training_over_a_ring_is_the_one_on_one_device():
    ring, alone = packed_training(4), packed_training(1)
    np.testing.assert_allclose(ring["losses"], alone["losses"], rtol=1e-5)
    assert_near(ring, alone, 1e-5)
    assert alone["losses"][-1] < 0.5 * alone["losses"][0]


def test_a_transformer_computes_in_bfloat16_from_float32_weights():
    ids, _ = token_ids()
    logits = {}
    for dtype in (None, jnp.bfloat16):
        sizes = TRANSFORMER | {"depth": 1, "compute_dtype": dtype}
        model = from_numpy(RingTransformer(**sizes, mesh=mesh_of(1), rngs=nnx.Rngs(0)), transformer_weights(depth=1))
        logits[dtype] = jax.jit(lambda ids, model=model: model(ids))(jnp.asarray(ids[:, :36]))
    assert logits[jnp.bfloat16].dtype == jnp.bfloat16
    assert_near({"logits": np.asarray(logits[jnp.bfloat16], np.float32)}, {"logits": np.asarray(logits[None])}, 0.02)


def test_weights_in_numpy_are_copies():
    layer = RingAttention(24, 4, kv_heads=2, head_dim=8, rngs=nnx.Rngs(0))
    state = to_numpy(layer)
    kept = {name: x.copy() for name, x in state.items()}
    for x in state.values():
        x[:] = 7
    for name, x in to_numpy(layer).items():
        np.testing.assert_array_equal(x, kept[name])


def test_arrays_that_do_not_fit_are_refused():
    rotary, x = RotaryEmbedding(8), jnp.ones((2, 4, 1, 8))
    with pytest.raises(ValueError, match="positions must be integers, got float32"):
        rotary(x, jnp.arange(4.0))
    with pytest.raises(ValueError, match=r"must be \[4\] or \[2, 4\], got \[5\]"):
        rotary(x, jnp.arange(5))
    with pytest.raises(ValueError, match=r"x must be \[batch, tokens, heads, 8\], got \[2, 4, 8\]"):
        rotary(x[:, :, 0], jnp.arange(4))
    with pytest.raises(ValueError, match=r"x must be \[batch, tokens, 24\], got \[4, 24\]"):
        RingAttention(24, 4, rngs=nnx.Rngs(0))(jnp.ones((4, 24)))
    with pytest.raises(ValueError, match=r"ids must be integers \[batch, tokens\], got float32 \[2, 4\]"):
        RingTransformer(**TRANSFORMER, mesh=mesh_of(1), rngs=nnx.Rngs(0))(jnp.ones((2, 4)))
    with pytest.raises(ValueError, match=r"labels must be \[2, 4\]"):
        loss(jnp.ones((2, 4, 7)), jnp.ones((2, 5), jnp.int32), axis_name=None)
    with pytest.raises(ValueError, match="'seq' is not a mesh axis here: call loss inside"):
        loss(jnp.ones((2, 4, 7)), jnp.ones((2, 4), jnp.int32))


@pytest.mark.parametrize("layer", [RingAttention(24, 4, rngs=nnx.Rngs(0)), RingTransformer(**TRANSFORMER, rngs=nnx.Rngs(0))])
def test_a_call_outside_shard_map_without_a_mesh_names_the_module_and_its_argument(layer):
    x = jnp.ones((1, 20), jnp.int32) if isinstance(layer, RingTransformer) else jnp.ones((1, 20, 24))
    name = type(layer).__name__
    with pytest.raises(ValueError, match=f"call {name} inside jax.shard_map over .*, or make it with mesh=mesh"):
        layer(x)


def test_an_indivisible_shard_is_refused_in_the_words_of_ring_attention():
    layer = RingAttention(24, 4, mesh=mesh_of(4), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="to_layout"):
        layer(jnp.ones((1, 20, 24)))


def test_without_flax_the_layers_name_the_extra_that_brings_it():
    without = patch("ring_attn_jax.import_module", side_effect=ModuleNotFoundError(name="flax"))
    with without, pytest.raises(ModuleNotFoundError, match=r"to_numpy needs flax: run pip install 'ring-attn\[flax\]'"):
        getattr(ring_attn_jax, "to_numpy")  # noqa: B009  # an attribute that is imported
