"""Log-probabilities and entropies of tokens in JAX: values and gradients against all logits in float64, and their memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ring_attn_core.reference.tolerance import relative_error
from ring_attn_jax import count_labels, loss, token_log_probs

from ..support.losses import CHUNKS, cotangents_of_tokens, exact_log_probs, hidden_states
from ..support.models import Arrays, assert_near
from ..support.selection import first
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


@pytest.mark.parametrize("chunk", first([*CHUNKS[1::2], *CHUNKS[::2]]))
def test_values_and_gradients_are_exact_in_float64(chunk):
    arrays, cotangents = hidden_states(), cotangents_of_tokens()
    truth = exact_log_probs(*arrays, *cotangents)
    with jax.enable_x64(True):
        hidden, head, labels = map(jnp.asarray, arrays)
        got = results(partial(of_hidden, labels=labels, chunk=chunk), cotangents, hidden=hidden, head=head)
        assert_near(got, {name: truth[name] for name in truth if name != "dlogits"}, 1e-14)
        of_logits = partial(token_log_probs, labels=labels, chunk=chunk, entropy=True)
        got = results(of_logits, cotangents, logits=hidden @ head.T)
        assert_near(got, {name: truth[name] for name in ("dlogits", "logp", "entropy")}, 1e-14)
        logp = token_log_probs(hidden, labels, head=head, chunk=chunk)
        assert_near({"logp": np.asarray(logp)}, {"logp": truth["logp"]}, 1e-14)


def test_logits_are_divided_by_the_temperature():
    (hidden, head, labels), cotangents = hidden_states(), cotangents_of_tokens()
    truth = exact_log_probs(hidden, head / 0.7, labels, *cotangents)
    truth |= {name: truth[name] / 0.7 for name in ("dhead", "dlogits")}
    with jax.enable_x64(True):
        hidden, head, labels = map(jnp.asarray, (hidden, head, labels))
        got = results(partial(of_hidden, labels=labels, chunk=7, temperature=0.7), cotangents, hidden=hidden, head=head)
        assert_near(got, {name: truth[name] for name in truth if name != "dlogits"}, 1e-14)
        of_logits = partial(token_log_probs, labels=labels, entropy=True, temperature=0.7)
        got = results(of_logits, cotangents, logits=hidden @ head.T)
        assert_near(got, {name: truth[name] for name in ("dlogits", "logp", "entropy")}, 1e-14)


def test_bfloat16_gives_float32_and_sums_the_heads_gradient_in_it():
    rng = np.random.default_rng(0)
    hidden, head = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((1, 2048, 4), (5, 4)))
    labels, cotangents = rng.integers(0, 5, (1, 2048)).astype(np.int32), rng.standard_normal((2, 1, 2048))
    truth = exact_log_probs(np.asarray(hidden, np.float64), np.asarray(head, np.float64), labels, *cotangents)
    labels = jnp.asarray(labels)
    assert [x.dtype for x in of_hidden(hidden, head, labels)] == [jnp.float32] * 2
    got = results(partial(of_hidden, labels=labels, chunk=1), cotangents, hidden=hidden, head=head)
    assert relative_error(got["logp"], truth["logp"]) <= 1e-6
    assert relative_error(got["entropy"], truth["entropy"]) <= 1e-6
    assert relative_error(got["dhead"], truth["dhead"]) <= 2**-7
    assert relative_error(got["dhidden"], truth["dhidden"]) <= 2**-7


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


def test_the_weighted_sum_is_the_loss():
    with jax.enable_x64(True):
        hidden, head, labels = map(jnp.asarray, hidden_states())
        value = -token_log_probs(hidden, labels, head=head, chunk=7).sum()  # type: ignore[union-attr]
        np.testing.assert_allclose(value, loss(hidden, labels, head=head, reduction="sum", axis_name=None), rtol=1e-14)


@pytest.mark.parametrize("given", ["hidden", "logits"])
def test_nan_where_there_is_no_label_changes_no_bit_and_a_strange_label_is_nan(given):
    hidden, head, labels = map(jnp.asarray, hidden_states(np.float32))
    rows = hidden if given == "hidden" else hidden @ head.T
    poisoned = jnp.where(labels[..., None] == -100, jnp.nan, rows)
    of: dict[str, Any] = {"head": head} if given == "hidden" else {}
    call = lambda x, head=None: token_log_probs(x, labels, head=head, chunk=7, entropy=True)
    clean, other = (results(call, cotangents_of_tokens(), x=x, **of) for x in (rows, poisoned))
    jax.tree.map(np.testing.assert_array_equal, clean, other)
    values = token_log_probs(rows, labels.at[0, 20].set(31).at[1, 21].set(-1), entropy=True, **of)
    for value in values:
        assert np.argwhere(np.isnan(value)).tolist() == [[0, 20], [1, 21]]


@pytest.mark.parametrize("strange", [np.full((1, 2), 2**32 - 100, np.uint32), np.array([[2**32, -(2**32)]])])
def test_a_label_beyond_int32_is_no_other_label(strange):
    logits = jnp.ones((1, 2, 3))
    assert np.isnan(token_log_probs(logits, strange)).all()
    assert np.isnan(loss(logits, strange, axis_name=None))
    assert count_labels(strange, axis_name=None) == 2


def test_a_batch_without_rows_has_no_values():
    given = jnp.ones((0, 8, 4)), jnp.zeros((0, 8), jnp.int32)
    assert token_log_probs(*given, head=jnp.ones((3, 4)), chunk=3).shape == (0, 8)  # type: ignore[union-attr]


def test_logits_of_minus_infinity_leave_entropy_and_gradients_finite():
    labels = jnp.array([[0]])
    call = lambda logits: token_log_probs(logits, labels, entropy=True)
    three, two = (results(call, np.ones((2, 1, 1)), x=jnp.array([[[0.0, 1.0, *more]]])) for more in ([-jnp.inf], []))
    np.testing.assert_allclose(three.pop("dx")[0, 0], [*two.pop("dx")[0, 0], 0], rtol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), three, two)


ROWS, WORDS = 512, 4096


def test_log_probs_of_hidden_states_take_some_chunks_of_logits():
    hidden, head = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, ROWS, 16), (WORDS, 16)))
    labels = jax.ShapeDtypeStruct((1, ROWS), jnp.int32)
    objective = lambda given, labels: token_log_probs(given[0], labels, head=given[1], chunk=32).sum()  # type: ignore[union-attr]
    program = jax.jit(jax.value_and_grad(objective)).lower((hidden, head), labels).compile(compiler_options=AS_USERS)
    chunk = 32 * WORDS * 4  # bytes, of which all logits have 16 times as many
    held = program.memory_analysis().temp_size_in_bytes  # type: ignore[union-attr]
    assert held <= 4.5 * chunk + 4 * (ROWS + WORDS) * 16 * 4


X, W, Y = jnp.ones((2, 4, 3)), jnp.ones((7, 3)), jnp.ones((2, 4), jnp.int32)


def test_a_traced_ignore_index_is_refused_in_words():
    call = jax.jit(lambda ignored: token_log_probs(X, Y, ignore_index=ignored))
    with pytest.raises(ValueError, match=r"ignore_index must be a Python number, .* name it in static_argnums"):
        call(-100)
    known: Any = jnp.int32(-100)
    np.testing.assert_array_equal(token_log_probs(X, Y, ignore_index=known), token_log_probs(X, Y))
