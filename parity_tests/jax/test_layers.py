"""The flax layers: their windows, training and labels, and what is refused outside of a mesh or without flax."""

from __future__ import annotations

from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import ring_attn_jax
from ring_attn_core import Band, causal, full
from ring_attn_jax import from_layout, to_layout
from ring_attn_jax.layers.attention import RingAttention
from ring_attn_jax.layers.transformer import RingTransformer
from ring_attn_jax.training.loss import loss
from ring_attn_jax.training.weights import from_numpy

from ..support.models import LENGTH, MIDDLE, TRANSFORMER, VOCAB, layer_pair, token_pair, transformer_weights
from ..support.selection import first
from .ring import mesh_of


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


def test_ids_that_are_no_integers_and_a_loss_without_a_ring_are_refused():
    with pytest.raises(ValueError, match=r"ids must be integers \[batch, tokens\], got float32 \[2, 4\]"):
        RingTransformer(**TRANSFORMER, mesh=mesh_of(1), rngs=nnx.Rngs(0))(jnp.ones((2, 4)))
    with pytest.raises(ValueError, match="'seq' is not a mesh axis here: call loss inside"):
        loss(jnp.ones((2, 4, 7)), jnp.ones((2, 4), jnp.int32))


@pytest.mark.parametrize("layer", [RingAttention(24, 4, rngs=nnx.Rngs(0)), RingTransformer(**TRANSFORMER, rngs=nnx.Rngs(0))])
def test_a_call_outside_shard_map_without_a_mesh_names_the_module_and_its_argument(layer):
    x = jnp.ones((1, 20), jnp.int32) if isinstance(layer, RingTransformer) else jnp.ones((1, 20, 24))
    name = type(layer).__name__
    with pytest.raises(ValueError, match=f"call {name} inside jax.shard_map over .*, or make it with mesh=mesh"):
        layer(x)


def test_without_flax_the_layers_name_the_extra_that_brings_it():
    without = patch("ring_attn_jax.import_module", side_effect=ModuleNotFoundError(name="flax"))
    with without, pytest.raises(ModuleNotFoundError, match=r"to_numpy needs flax: run pip install 'ring-attn\[flax\]'"):
        getattr(ring_attn_jax, "to_numpy")  # noqa: B009  # an attribute that is imported
