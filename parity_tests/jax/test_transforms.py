"""sharded_ring_attention and its kin under vmap over a mesh axis, jax.export, forward mode and arrays that lie elsewhere."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding

import ring_attn_jax
from ring_attn_jax import (
    attend_block,
    prefix_extents,
    ring_attention,
    sharded_dilated_attention,
    sharded_ring_attention,
    sharded_summary_attention,
    sliding_window,
)

from ..support.selection import first
from .ring import QUICK

ONE, TWO = (jax.make_mesh((ranks,), ("seq",), axis_types=(AxisType.Auto,)) for ranks in (1, 2))
FOUR = jax.make_mesh((2, 2), ("data", "seq"), axis_types=(AxisType.Auto,) * 2)

SHARDED: dict[str, Any] = {
    "ring": lambda q, k, v, mesh: sharded_ring_attention(q, k, v, mesh=mesh, sinks=q[0, 0, :, 0]),
    "dilated": lambda q, k, v, mesh: sharded_dilated_attention(q, k, v, mesh=mesh, segments=(3, 8), dilations=(1, 2)),
    "summary": lambda q, k, v, mesh: sharded_summary_attention(q, k, v, mesh=mesh, block=2, window=1, pooling="mean"),
}


def drawn(*batch: int, tokens: int = 8) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal((*batch, tokens, heads, 4)), jnp.float32) for heads in (4, 2, 2)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SHARDED)
def test_vmap_over_a_mesh_axis_gives_what_each_row_alone_gives(name):
    arrays = drawn(4, 1)
    weights = jnp.cos(jnp.arange(arrays[0].size)).reshape(arrays[0].shape)
    call = lambda q, k, v, weight: SHARDED[name](q, k, v, FOUR) * weight
    compiled = lambda f: jax.jit(jax.value_and_grad(lambda *x: f(*x).sum(), (0, 1, 2)), compiler_options=QUICK)
    got = compiled(jax.vmap(call, spmd_axis_name="data"))(*arrays, weights)
    alone = compiled(call)  # one program for all rows
    sums, gradients = zip(*(alone(*row) for row in zip(*arrays, weights, strict=True)), strict=True)
    want = sum(sums), tuple(map(jnp.stack, zip(*gradients, strict=True)))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), got, want)


def test_vmap_over_a_mesh_axis_of_queries_alone():
    q, k, v = drawn(4, 1)
    call = jax.jit(lambda q: sharded_ring_attention(q, k[0], v[0], mesh=FOUR))
    got = jax.jit(jax.vmap(call, spmd_axis_name="data"))(q)
    np.testing.assert_allclose(got, jnp.stack([call(row) for row in q]), rtol=1e-5, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", first(["ring", "extents", "dilated"], 1, 2))
def test_an_exported_gradient_takes_any_batch(name):
    """On one device: XLA (jax 0.12) ends the process where the gradient that it compiles again is over several."""
    arrays, mesh = drawn(3), ONE
    extents = lambda q, k, v, mesh: sharded_ring_attention(
        q, k, v, mesh=mesh, extents=jnp.broadcast_to(prefix_extents(3, 8), (q.shape[0], 8, 2)), dropout_rate=0.2, dropout_seed=3
    )
    call = (SHARDED | {"extents": extents})[name]
    gradients = jax.jit(jax.grad(lambda *x: jnp.square(call(*x, mesh)).sum(), (0, 1, 2)))
    (batch,) = export.symbolic_shape("b")
    program = export.export(gradients)(*(jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in arrays))
    placed = [jax.device_put(x, NamedSharding(mesh, jax.P())) for x in arrays]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), jax.jit(program.call)(*placed), gradients(*placed))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "strategy"), first([(2, "ring"), (4, "gather"), (4, "two_way"), (2, "ulysses"), (4, "direct")])
)
def test_a_gradient_over_a_ring_is_exported_for_any_batch(ranks, strategy):
    """With XLA's older partitioner: the newer one ends the process at a dynamic_slice of JAX alone (jax 0.10)."""
    arrays, mesh = drawn(3), jax.make_mesh((ranks,), ("seq",), axis_types=(AxisType.Auto,))
    call = partial(sharded_ring_attention, mesh=mesh, strategy=strategy, backend="blockwise")
    gradients = jax.jit(jax.value_and_grad(lambda *x: jnp.square(call(*x)).sum(), (0, 1, 2)))
    (batch,) = export.symbolic_shape("b")
    shapes = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in arrays]
    assert export.export(gradients)(*shapes).in_avals[0].shape[0] == batch
    placed = [jax.device_put(x, NamedSharding(mesh, jax.P())) for x in arrays]
    newer = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        got = jax.jit(export.export(gradients)(*shapes).call)(*placed)
    finally:
        jax.config.update("jax_use_shardy_partitioner", newer)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), got, gradients(*placed))


@pytest.mark.parametrize("name", [*SHARDED, "block"])
def test_a_symbolic_length_is_refused_in_words(name):
    call = (SHARDED | {"block": lambda q, k, v, mesh: attend_block(q, k, v)})[name]
    (tokens,) = export.symbolic_shape("s")
    arrays = [jax.ShapeDtypeStruct((2, tokens, *x.shape[2:]), x.dtype) for x in drawn(2)]
    with pytest.raises(ValueError, match=r"q has the symbolic shape .*may leave the batch open"):
        export.export(jax.jit(lambda *x: call(*x, ONE)))(*arrays)


def test_kernels_refuse_a_symbolic_batch():
    (batch,) = export.symbolic_shape("b")
    arrays = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in drawn(2)]
    with pytest.raises(ValueError, match=r"launched for a known batch, .* symbolic size b"):
        export.export(jax.jit(lambda *x: sharded_ring_attention(*x, mesh=ONE, backend="triton")))(*arrays)


FORWARD: dict[str, Any] = {
    "jvp": lambda f, q: jax.jvp(f, (q,), (q,)),
    "jvp under jit": lambda f, q: jax.jit(lambda q: jax.jvp(f, (q,), (q,)))(q),
    "linearize": lambda f, q: jax.linearize(f, q)[1](q),
}


@pytest.mark.parametrize("how", first(FORWARD, 1, 2))
@pytest.mark.parametrize("name", [*SHARDED, "block"])
def test_forward_mode_is_refused_in_words(name, how):
    q, k, v = drawn(1)
    call = (SHARDED | {"block": lambda q, k, v, mesh: attend_block(q, k, v)[0]})[name]
    with pytest.raises(NotImplementedError, match=r"no forward-mode derivative, .* use jax\.grad or jax\.vjp"):
        FORWARD[how](jax.jit(lambda q: call(q, k, v, ONE).sum()), q)


@pytest.mark.parametrize("how", ["jacfwd", "hessian"])
def test_many_tangents_at_once_are_refused_by_the_library_or_under_jit_by_jax(how):
    """As docs/errors.md says: they map tangents by ``vmap``, which under ``jit`` meets JAX's own refusal first."""
    q, k, v = drawn(1, tokens=2)
    derivative = getattr(jax, how)(lambda q: jax.jit(SHARDED["ring"], static_argnums=3)(q, k, v, ONE).sum())
    with pytest.raises((NotImplementedError, TypeError), match="forward-mode"):
        derivative(q)
    with pytest.raises(TypeError, match=r"can't apply forward-mode autodiff \(jvp\) to a custom_vjp function"):
        jax.jit(derivative)(q)


@pytest.mark.parametrize("kind", first([AxisType.Explicit, AxisType.Auto], 1, 1))
@pytest.mark.parametrize("name", first(SHARDED))
def test_arrays_that_lie_on_another_device_are_copied_to_the_mesh(name, kind):
    mesh, arrays = jax.make_mesh((2,), ("seq",), axis_types=(kind,)), drawn(2)
    want = SHARDED[name](*arrays, mesh)
    for device in jax.devices()[:4:3]:
        np.testing.assert_array_equal(SHARDED[name](*(jax.device_put(x, device) for x in arrays), mesh), want)


@pytest.mark.exhaustive
def test_a_gradient_of_arrays_on_another_device_lies_where_they_lie():
    q, k, v = (jax.device_put(x, jax.devices()[3]) for x in drawn(1))
    gradient = jax.grad(lambda q: sharded_ring_attention(q, k, v, mesh=TWO).sum())(q)
    assert gradient.sharding.device_set == {jax.devices()[3]}


def test_help_shows_every_argument_of_the_sharded_call():
    ours, inside = (list(inspect.signature(f).parameters.values()) for f in (sharded_ring_attention, ring_attention))
    more = {"mesh", "batch_axes", "head_axis"}
    assert [(x.name, x.kind, x.default) for x in ours if x.name not in more] == [(x.name, x.kind, x.default) for x in inside]


@pytest.mark.parametrize(
    ("keyword", "advice"), [("causal", r"pass mask=causal\(\)"), ("kv_lenght", "did you mean kv_length"), ("xyz", "help")]
)
def test_an_unknown_keyword_names_the_function_and_the_nearest_one(keyword, advice):
    with pytest.raises(TypeError, match=rf"sharded_ring_attention\(\) has no argument '{keyword}'.*{advice}"):
        sharded_ring_attention(*drawn(1), mesh=ONE, **{keyword: True})


@pytest.mark.parametrize("name", ["scale", "softcap", "length", "dropout_rate", "window"])
def test_a_traced_number_is_refused_with_what_to_do(name):
    q, k, v = drawn(1)

    def program(x):
        options = {"mask": sliding_window(x)} if name == "window" else {name: x}
        return sharded_ring_attention(q, k, v, mesh=ONE, **options)

    with pytest.raises(ValueError, match=r"a traced array of shape .*static_argnames of jax\.jit"):
        jax.jit(program)(2)


def test_an_unknown_backend_is_offered_those_of_this_package():
    with pytest.raises(ValueError, match=r'choose "auto" or one of hopper, triton, triton_tf32, blockwise(\n|$)'):
        sharded_ring_attention(*drawn(1), mesh=ONE, backend="abacus")


def test_dir_lists_every_public_name():
    assert set(ring_attn_jax.__all__) <= set(dir(ring_attn_jax))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inside", "remat"),
    first([(False, False), (True, True), (False, True), (True, False)], 1, 2),
    ids=["sharded-False", "inside a shard_map-True", "sharded-True", "inside a shard_map-False"],
)
def test_layers_in_a_scan_are_those_of_a_loop(inside: bool, remat: bool):
    weights, x = jax.random.normal(jax.random.key(0), (2, 8, 24)) / 4, jax.random.normal(jax.random.key(1), (1, 6, 8))
    attend = ring_attention if inside else partial(sharded_ring_attention, mesh=TWO)

    def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        q, k, v = jnp.split((x @ weight).reshape(*x.shape[:2], 6, 4), 3, axis=2)
        return x + attend(q, k, v, layout="contiguous").reshape(x.shape), None

    def looped(x: jax.Array, weights: jax.Array) -> jax.Array:
        for weight in weights:
            x, _ = layer(x, weight)
        return x

    def gradients(stack: Any) -> Any:
        of_all = jax.shard_map(stack, mesh=TWO, in_specs=(jax.P(None, "seq"), jax.P()), out_specs=jax.P(None, "seq"))
        objective = lambda x, weights: jnp.sin((of_all if inside else stack)(x, weights)).sum()
        return jax.jit(jax.value_and_grad(objective, (0, 1)), compiler_options=QUICK)(x, weights)

    scanned = lambda x, weights: jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, weights)[0]
    got, want = gradients(scanned), gradients(looped)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), got, want)
