"""The loss in chunks in JAX: of hidden states and a head as of the logits, over rings and meshes, within a memory XLA tells."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ring_attn_jax import count_labels, loss, token_log_probs

from ..support.losses import exact_loss, hidden_states
from ..support.models import assert_near
from ..support.selection import first
from .ring import AS_USERS, mesh_of


def chunked(hidden: Any, head: Any, labels: Any, **options: Any) -> jax.Array:
    return loss(hidden, labels, head=head, **options)


def named(value: Any, gradients: Any) -> dict[str, np.ndarray]:
    return {"loss": np.asarray(value), "dhidden": np.asarray(gradients[0]), "dhead": np.asarray(gradients[1])}


@pytest.mark.parametrize(
    ("types", "weighted"), first([(AxisType.Explicit, False), (AxisType.Auto, True), (AxisType.Auto, False)], 2)
)
def test_whole_arrays_on_a_mesh_are_cut_by_every_device(types, weighted):
    """The head is sharded over the data axis too, as FSDP has it. Without ``mesh`` the loss is the same."""
    hidden, head, labels = hidden_states(np.float32)
    head = head[:30]
    labels[labels >= 30] = -100
    weights = np.random.default_rng(7).random(labels.shape, np.float32) if weighted else None
    truth = exact_loss(hidden, head, labels, weights=weights)
    mesh = jax.make_mesh((2, 4), ("data", "seq"), axis_types=(types, types))
    specs = PartitionSpec("data", "seq"), PartitionSpec("data"), PartitionSpec("data", "seq")
    with jax.set_mesh(mesh):
        given = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((hidden, head, labels), specs, strict=True)]
        for where in ({"mesh": mesh, "batch_axes": "data", "chunk": 3}, {"axis_name": None, "chunk": 16}):
            step = jax.jit(jax.value_and_grad(partial(chunked, **where, label_weights=weights), (0, 1)))
            assert_near(named(*step(*given)), {name: truth[name] for name in ("loss", "dhidden", "dhead")}, 1e-6)
        assert count_labels(given[2], axis_name=None) == (labels != -100).sum()


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
    """Return the bytes that a program holds beside its arguments and results, loss and gradients."""
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


@pytest.mark.parametrize("over", ["mesh", "one device"])
@pytest.mark.parametrize("head", [None, W])
def test_outside_jit_a_repeated_loss_compiles_nothing(head, over):
    where = {"mesh": mesh_of(2)} if over == "mesh" else {"axis_name": None}
    call, scores = partial(loss, **where, ignore_index=jnp.int32(-100)), token_log_probs
    other = X + 1
    for x in (X, other):
        with jax.no_tracing(x is other):
            call(x, Y, head=head)
            scores(x, Y, head=head)
