"""The loss in chunks in JAX: of hidden states and a head as of the logits, over rings and meshes, within a memory XLA tells."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ring_attn_core.reference.tolerance import relative_error
from ring_attn_jax import count_labels, loss

from ..support.losses import CHUNKS, exact_loss, hidden_states
from ..support.models import assert_near
from ..support.selection import first
from .models import REPLICATED
from .ring import AS_USERS, SEQ, mesh_of


def chunked(hidden: Any, head: Any, labels: Any, **options: Any) -> jax.Array:
    return loss(hidden, labels, head=head, **options)


def of_logits(hidden: Any, head: Any, labels: Any, **options: Any) -> jax.Array:
    return loss(hidden @ head.T, labels, **options)


def named(value: Any, gradients: Any) -> dict[str, np.ndarray]:
    return {"loss": np.asarray(value), "dhidden": np.asarray(gradients[0]), "dhead": np.asarray(gradients[1])}


@pytest.mark.parametrize(
    ("ranks", "reduction", "chunks"), first([(1, "mean", CHUNKS), (2, "sum", (7, "logits")), (4, "mean", (7, "logits"))], 2)
)
def test_loss_of_hidden_states_in_chunks_is_exact_in_float64(ranks, reduction, chunks):
    truth = exact_loss(*hidden_states(), reduction)
    with jax.enable_x64(True):
        given = [jnp.asarray(x) for x in hidden_states()]
        for chunk in chunks:
            objective = of_logits if chunk == "logits" else partial(chunked, chunk=chunk)
            step = jax.value_and_grad(partial(objective, reduction=reduction), (0, 1))
            specs = (SEQ, REPLICATED, SEQ), (REPLICATED, (SEQ, REPLICATED))
            ring = jax.shard_map(step, mesh=mesh_of(ranks), in_specs=specs[0], out_specs=specs[1])
            assert_near(named(*jax.jit(ring)(*given)), {name: truth[name] for name in ("loss", "dhidden", "dhead")}, 1e-14)


@pytest.mark.parametrize("types", first([AxisType.Explicit, AxisType.Auto]))
def test_whole_arrays_on_a_mesh_are_cut_by_every_device(types):
    """The head is sharded over the data axis too, as FSDP has it. Without ``mesh`` the loss is the same."""
    hidden, head, labels = hidden_states(np.float32)
    head = head[:30]
    labels[labels >= 30] = -100
    truth = exact_loss(hidden, head, labels)
    mesh = jax.make_mesh((2, 4), ("data", "seq"), axis_types=(types, types))
    specs = PartitionSpec("data", "seq"), PartitionSpec("data"), PartitionSpec("data", "seq")
    with jax.set_mesh(mesh):
        given = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((hidden, head, labels), specs, strict=True)]
        for where in ({"mesh": mesh, "batch_axes": "data", "chunk": 3}, {"axis_name": None, "chunk": 16}):
            step = jax.jit(jax.value_and_grad(partial(chunked, **where), (0, 1)))
            assert_near(named(*step(*given)), {name: truth[name] for name in ("loss", "dhidden", "dhead")}, 1e-6)
        assert count_labels(given[2], axis_name=None) == (labels != -100).sum()


def test_accumulated_microbatches_of_uneven_labels_have_the_gradient_of_the_whole_batch():
    hidden, head, labels = hidden_states(np.float32)
    labels[1, :30] = -100
    truth = exact_loss(hidden, head, labels)

    def step(hidden, head, labels):
        """A microbatch is a row."""
        rows = [(hidden[row : row + 1], labels[row : row + 1]) for row in range(2)]
        total = sum(count_labels(of) for _, of in rows)
        part = lambda head, hidden, of: chunked(hidden, head, of, chunk=7, reduction="sum") / total
        results = [jax.value_and_grad(part)(head, *row) for row in rows]
        return sum(value for value, _ in results), sum(gradient for _, gradient in results)

    ring = jax.shard_map(step, mesh=mesh_of(2), in_specs=(SEQ, REPLICATED, SEQ), out_specs=REPLICATED)
    value, dhead = jax.jit(ring)(hidden, head, labels)
    assert_near({"loss": np.asarray(value), "dhead": np.asarray(dhead)}, {name: truth[name] for name in ("loss", "dhead")}, 1e-6)
    means = [exact_loss(hidden[row : row + 1], head, labels[row : row + 1])["loss"] for row in range(2)]
    assert abs(np.mean(means) - truth["loss"]) > 1e-3  # the mean of means is another loss


def test_the_heads_gradient_is_summed_in_float32():
    """Over 2,048 chunks of a token, of bfloat16 hidden states and weights: a sum in bfloat16 would be off by a third."""
    rng = np.random.default_rng(0)
    hidden, head = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((1, 2048, 4), (5, 4)))
    labels = rng.integers(0, 5, (1, 2048)).astype(np.int32)
    truth = exact_loss(np.asarray(hidden, np.float64), np.asarray(head, np.float64), labels, "sum")
    step = jax.jit(jax.value_and_grad(partial(chunked, chunk=1, reduction="sum", axis_name=None), (0, 1)))
    value, (dhidden, dhead) = step(hidden, head, jnp.asarray(labels))
    assert (value.dtype, dhidden.dtype, dhead.dtype) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)
    np.testing.assert_allclose(value, truth["loss"], rtol=1e-6)
    assert relative_error(np.asarray(dhead, np.float64), truth["dhead"]) <= 2**-8
    assert relative_error(np.asarray(dhidden, np.float64), truth["dhidden"]) <= 2**-7


def test_nan_where_there_is_no_label_changes_no_bit():
    hidden, head, labels = map(jnp.asarray, hidden_states(np.float32))
    poisoned = jnp.where(labels[..., None] == -100, jnp.nan, hidden)
    step = jax.jit(jax.value_and_grad(partial(chunked, chunk=7, axis_name=None), (0, 1)))
    jax.tree.map(np.testing.assert_array_equal, step(hidden, head, labels), step(poisoned, head, labels))
    step = jax.jit(jax.value_and_grad(partial(loss, axis_name=None)))
    given = [jnp.where(jnp.isnan(x).any(-1, keepdims=True), x[..., :1], hidden @ head.T) for x in (hidden, poisoned)]
    assert jnp.isnan(given[1]).any()
    jax.tree.map(np.testing.assert_array_equal, *(step(logits, labels) for logits in given))


ROWS, WORDS = 512, 4096


def test_the_loss_of_logits_sets_aside_less_than_their_float32():
    """XLA's reductions on a CPU take float32, so it converts bfloat16 once: 2 in the logits' own bytes, where 4 were."""
    for dtype, most in ((jnp.bfloat16, 2.1), (jnp.float32, 0.1)):
        logits = jax.ShapeDtypeStruct((1, ROWS, WORDS), dtype)
        assert temp_bytes(partial(loss, axis_name=None), logits) <= most * ROWS * WORDS * jnp.dtype(dtype).itemsize


def test_the_loss_of_hidden_states_takes_a_chunk_of_logits():
    hidden, head = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1, ROWS, 16), (WORDS, 16)))
    objective = lambda given, labels: chunked(given[0], given[1], labels, chunk=32, axis_name=None)
    chunk = 32 * WORDS * 4  # bytes, of which all logits have 16 times as many
    assert temp_bytes(objective, (hidden, head)) <= 4.1 * chunk + 4 * (ROWS + WORDS) * 16 * 4


def temp_bytes(objective: Any, given: Any) -> int:
    """What a program holds beside its arguments and results, loss and gradients."""
    labels = jax.ShapeDtypeStruct((1, ROWS), jnp.int32)
    program = jax.jit(jax.value_and_grad(objective)).lower(given, labels).compile(compiler_options=AS_USERS)
    return program.memory_analysis().temp_size_in_bytes  # type: ignore[union-attr]


X, W, Y = jnp.ones((2, 4, 3)), jnp.ones((7, 3)), jnp.ones((2, 4), jnp.int32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_axes": "data"}, r"batch_axes='data' goes with mesh="),
        ({"axis_name": 5}, "axis_name must be the name of a mesh axis, a tuple of names, or None for global arrays, got 5"),
        ({"axis_name": ("seq", 5)}, r"a tuple of names, or None for global arrays, got \('seq', 5\)"),
        ({"axis_name": "seq", "mesh": mesh_of(8), "head": W}, r"labels \[2, 4\] must be .* 1 members .* by rows and 8 by tokens"),
    ],
)
def test_a_mesh_that_makes_no_loss_is_refused(arguments, message):
    given: dict[str, Any] = {"logits": X, "labels": Y, "axis_name": None} | arguments
    with pytest.raises(ValueError, match=message):
        loss(given.pop("logits"), given.pop("labels"), **given)


def test_a_traced_ignore_index_is_refused_in_words_and_counted():
    call = jax.jit(lambda ignored: loss(X, Y, ignore_index=ignored, axis_name=None))
    with pytest.raises(ValueError, match=r"ignore_index must be a Python number, .* name it in static_argnums"):
        call(-100)
    count = jax.jit(lambda ignored: count_labels(Y, ignore_index=ignored, axis_name=None))
    assert [int(count(ignored)) for ignored in (1, -100)] == [0, Y.size]


def test_labels_are_counted_inside_shard_map_or_whole():
    with pytest.raises(ValueError, match="'seq' is not a mesh axis here: call count_labels inside"):
        count_labels(Y)
    with pytest.raises(ValueError, match=r"axis_name must be the name of a mesh axis, a tuple of names, or None .*, got 5"):
        count_labels(Y, axis_name=5)  # type: ignore[arg-type]
