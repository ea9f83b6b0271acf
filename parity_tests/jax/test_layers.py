"""The flax layers: what is refused of ids and outside of a mesh or without flax."""

from __future__ import annotations

from unittest.mock import patch

import jax.numpy as jnp
import pytest
from flax import nnx

import ring_attn_jax
from ring_attn_jax.layers.attention import RingAttention
from ring_attn_jax.layers.transformer import RingTransformer
from ring_attn_jax.training.loss import loss

from ..support.models import TRANSFORMER
from .ring import mesh_of


def test_ids_that_are_not_integers_and_a_loss_without_a_ring_are_refused():
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
