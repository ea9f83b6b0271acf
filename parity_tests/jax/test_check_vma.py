"""shard_map with ``check_vma=False``: what is right stays as it is, and what would train on wrong gradients is refused."""

# pyright: reportArgumentType=false

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from ring_attn_core.reference.tolerance import relative_error
from ring_attn_jax import ring_attention
from ring_attn_jax.training.loss import loss

from .ring import REPLICATED, SEQ, mesh_of

RNG = np.random.default_rng(0)
X, WEIGHT = (jnp.asarray(RNG.standard_normal(shape), jnp.float32) for shape in ((2, 16, 4, 8), (8, 7)))
LABELS = jnp.asarray(RNG.integers(0, 7, (2, 16)))
SINKS = jnp.linspace(-1.0, 1.0, 4)


def value(weight, x, labels):
    return loss(ring_attention(x, x, x, layout="contiguous").sum(2) @ weight, labels)


def step(weight, x, labels):
    """One step of a training loop that lies inside shard_map."""
    return weight - 0.1 * jax.grad(value)(weight, x, labels)


def over_ranks(function, ranks=4, check_vma=False, specs=(REPLICATED, SEQ, SEQ), out_specs=REPLICATED):
    return jax.jit(jax.shard_map(function, mesh=mesh_of(ranks), in_specs=specs, out_specs=out_specs, check_vma=check_vma))


def test_a_training_step_is_refused_when_it_is_traced():
    with pytest.raises(ValueError, match=r"loss has no derivative inside jax.shard_map\(check_vma=False\).*Leave check_vma"):
        over_ranks(step).lower(WEIGHT, X, LABELS)


def test_the_remedy_helps():
    one, two = (over_ranks(step, ranks, check_vma=True)(WEIGHT, X, LABELS) for ranks in (1, 2))
    np.testing.assert_allclose(one, two, rtol=0, atol=1e-6)


def test_a_training_step_on_one_rank_is_right():
    alone, checked = (over_ranks(step, 1, check_vma)(WEIGHT, X, LABELS) for check_vma in (False, True))
    np.testing.assert_allclose(alone, checked, rtol=0, atol=1e-6)


def test_the_loss_itself_is_right():
    values = [over_ranks(value, ranks)(WEIGHT, X, LABELS) for ranks in (1, 2)]
    np.testing.assert_allclose(*values, rtol=1e-6)


def gradients(q, k, v, sinks):
    """Taken inside shard_map; those of the sinks, which all ranks hold, one for every rank."""
    part = lambda *inputs: jnp.sin(ring_attention(*inputs[:3], sinks=inputs[3], layout="contiguous")).sum()
    *sharded, dsinks = jax.grad(part, (0, 1, 2, 3))(q, k, v, sinks)
    return *sharded, lax.pcast(dsinks, "seq", to="varying")[None]


@pytest.mark.exhaustive
def test_gradients_of_shards_are_right_and_those_of_sinks_are_parts_whose_sum_is_right():
    specs = {"specs": (SEQ, SEQ, SEQ, REPLICATED), "out_specs": (SEQ, SEQ, SEQ, PartitionSpec("seq"))}
    inputs = X, jnp.cos(X), jnp.sin(X), SINKS
    *truth, of_all = over_ranks(gradients, 2, True, **specs)(*inputs)
    *mine, parts = over_ranks(gradients, 2, False, **specs)(*inputs)
    for a, b in zip((*mine, parts.sum(0)), (*truth, of_all[0]), strict=True):
        assert relative_error(np.asarray(a), np.asarray(b)) <= 1e-6
