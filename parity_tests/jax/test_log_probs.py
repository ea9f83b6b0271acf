"""Log-probabilities and entropies of tokens in JAX: values and gradients against all logits in float64, and their memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ring_attn_jax import count_labels, loss, token_log_probs

from ..support.losses import cotangents_of_tokens, exact_log_probs, hidden_states
from ..support.models import Arrays, assert_near
from .ring import AS_USERS


def of_hidden(hidden: Any, head: Any, labels: Any, **options: Any) -> Any:
    return token_log_probs(hidden, labels, head=head, entropy=True, **options)


def results(function: Any, cotangents: Any, **leaves: Any) -> Arrays:
    """The values of ``function(*leaves)`` and its gradients, from one jitted program."""

    @jax.jit
    def program(*leaves: Any) -> Any:
        values, of = jax.vjp(function, *leaves)
        return values, of(tuple(jnp.asarray(y, values[0].dtype) for y in cotangents))

    values, gradients = program(*leaves.values())
    names = *(f"d{name}" for name in leaves), "logp", "entropy"
    return {name: np.asarray(x, np.float64) for name, x in zip(names, (*gradients, *values), strict=True)}


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
def test_whole_arrays_on_a_mesh_keep_their_sharding(types):
    arrays, cotangents = hidden_states(np.float32), cotangents_of_tokens()
    truth = exact_log_probs(*arrays, *cotangents)
    mesh = jax.make_mesh((2, 4), ("data", "seq"), axis_types=(types, types))
    specs = PartitionSpec("data", "seq"), PartitionSpec(), PartitionSpec("data", "seq")
    with jax.set_mesh(mesh):
        hidden, head, labels = (jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True))
        given = [jax.device_put(jnp.asarray(y, jnp.float32), NamedSharding(mesh, specs[0])) for y in cotangents]
        got = results(partial(of_hidden, labels=labels, chunk=16), given, hidden=hidden, head=head)
        assert_near(got, {name: truth[name] for name in truth if name != "dlogits"}, 1e-6)
        logits = jnp.einsum("bsd,vd->bsv", hidden, head)
        got = results(partial(token_log_probs, labels=labels, entropy=True), given, logits=logits)
        assert_near(got, {name: truth[name] for name in ("dlogits", "logp", "entropy")}, 1e-6)


@pytest.mark.parametrize("strange", [np.full((1, 2), 2**32 - 100, np.uint32), np.array([[2**32, -(2**32)]])])
def test_a_label_beyond_int32_does_not_become_another_label(strange):
    logits = jnp.ones((1, 2, 3))
    assert np.isnan(token_log_probs(logits, strange)).all()
    assert np.isnan(loss(logits, strange, axis_name=None))
    assert count_labels(strange, axis_name=None) == 2


def test_a_batch_without_rows_has_no_values():
    given = jnp.ones((0, 8, 4)), jnp.zeros((0, 8), jnp.int32)
    assert token_log_probs(*given, head=jnp.ones((3, 4)), chunk=3).shape == (0, 8)  # type: ignore[union-attr]


ROWS, WORDS = 512, 4096


def test_log_probs_of_hidden_states_take_some_chunks_of_logits():
    hidden, head = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, ROWS, 16), (WORDS, 16)))
    labels = jax.ShapeDtypeStruct((1, ROWS), jnp.int32)
    objective = lambda given, labels: token_log_probs(given[0], labels, head=given[1], chunk=32).sum()  # type: ignore[union-attr]
    program = jax.jit(jax.value_and_grad(objective)).lower((hidden, head), labels).compile(compiler_options=AS_USERS)
    chunk = 32 * WORDS * 4  # bytes, of which all logits have 16 times as many
    held = program.memory_analysis().temp_size_in_bytes  # type: ignore[union-attr]
    assert held <= 4.5 * chunk + 4 * (ROWS + WORDS) * 16 * 4


X, Y = jnp.ones((2, 4, 3)), jnp.ones((2, 4), jnp.int32)


def test_a_traced_ignore_index_is_refused_in_words():
    call = jax.jit(lambda ignored: token_log_probs(X, Y, ignore_index=ignored))
    with pytest.raises(ValueError, match=r"ignore_index must be a Python number, .* name it in static_argnums"):
        call(-100)
    known: Any = jnp.int32(-100)
    np.testing.assert_array_equal(token_log_probs(X, Y, ignore_index=known), token_log_probs(X, Y))
