"""Values that are columns of keys in JAX: in every transform, k sent alone, and what is refused when it is traced."""

# pyright: reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from ring_attn_core.plan.balanced import balanced_layout
from ring_attn_core.problem.traffic import traffic
from ring_attn_jax import TracedLayout, attend_block, sharded_ring_attention

from ..support.cases import Case
from ..support.selection import first
from ..support.strategies import STRATEGIES, fitted, problem_of
from .ring import mesh_of
from .test_strategies import traced_bytes

LATENT = Case(head_dim=24, v_dim=16, heads=4, kv_heads=1, values_in_keys=True)


@pytest.mark.parametrize("strategy", first(["ring", *STRATEGIES.values()], 2), ids=str)
def test_k_is_sent_alone_in_the_forward(strategy):
    case = fitted(replace(LATENT, strategy=strategy, dtype="bfloat16"))
    problem = problem_of(case, "jax")
    for rank, counted in enumerate(traced_bytes(case)):
        (forward, backward), (as_before, _) = traffic(problem, rank), traffic(problem.ordinary, rank)
        assert counted == forward.bytes + backward.bytes
        assert forward.bytes < as_before.bytes


def arrays(dtype=jnp.float32):
    q, k, dout = (np.random.default_rng(i).standard_normal((2, 12, h, d)) for i, (h, d) in enumerate(((4, 24), (1, 24), (4, 16))))
    return [jnp.asarray(x, dtype) for x in (q, k, dout)]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("kind", first([AxisType.Auto, AxisType.Explicit]))
@pytest.mark.parametrize("backend", first(["auto", "blockwise"]))
def test_it_is_v_as_a_slice_of_k_with_and_without_a_gradient(kind, backend):
    q, k, dout = arrays()
    mesh = jax.make_mesh((2,), ("seq",), axis_types=(kind,), devices=jax.devices()[:2])
    ours = lambda q, k: sharded_ring_attention(q, k, v_dim=16, mesh=mesh, backend=backend)
    theirs = lambda q, k: sharded_ring_attention(q, k, k[..., :16], mesh=mesh, backend=backend)
    (out, vjp), (want, vjp_of_both) = jax.vjp(ours, q, k), jax.vjp(theirs, q, k)
    for a, b in zip((out, *vjp(dout)), (want, *vjp_of_both(dout)), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(jax.jit(ours)(q, k), want)


def test_the_primal_never_makes_v():
    """Without a gradient the slice of k is not computed: XLA finds no use for it."""
    q, k, _ = arrays()
    forward = lambda q, k: sharded_ring_attention(q, k, v_dim=16, mesh=mesh_of(2))
    text = jax.jit(forward).lower(q, k).compile().as_text()
    assert "f32[2,6,1,24]" in text
    assert "f32[2,6,1,40]" not in text, "k and v side by side"


@pytest.mark.exhaustive
def test_checkpoint_vmap_and_scan_take_it():
    q, k, dout = arrays()
    layer = lambda q, k: sharded_ring_attention(q, k, v_dim=16, mesh=mesh_of(2))
    loss = lambda f: lambda q, k: (f(q, k) * dout).sum()
    want = jax.grad(loss(layer), (0, 1))(q, k)
    saved = jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names("ring_attn_out", "ring_attn_lse"))
    for a, b in zip(jax.jit(jax.grad(loss(saved), (0, 1)))(q, k), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)
    mapped = jax.vmap(layer)(jnp.stack([q, 2 * q]), jnp.stack([k, k]))
    np.testing.assert_allclose(mapped[1], layer(2 * q, k), rtol=2e-6, atol=1e-6)
    scanned, _ = jax.lax.scan(lambda total, x: (total + layer(q, x), None), jnp.zeros_like(dout), jnp.stack([k, k]))
    np.testing.assert_allclose(scanned, 2 * layer(q, k), rtol=2e-6, atol=1e-6)


@pytest.mark.exhaustive
def test_a_traced_layout_takes_it():
    q, k, dout = arrays()
    layout = balanced_layout((5, 7), 2)
    extents = jnp.broadcast_to(jnp.array([0, 12]), (2, 12, 2))
    options = {"layout": TracedLayout.of(layout), "extents": extents, "mesh": mesh_of(2)}
    ours = lambda q, k: sharded_ring_attention(q, k, v_dim=16, **options)
    theirs = lambda q, k: sharded_ring_attention(q, k, k[..., :16], **options)
    (out, vjp), (want, vjp_of_both) = jax.vjp(ours, q, k), jax.vjp(theirs, q, k)
    for a, b in zip((out, *vjp(dout)), (want, *vjp_of_both(dout)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_forward_mode_is_refused_in_words():
    q, k, _ = arrays()
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        jax.jvp(lambda k: sharded_ring_attention(q, k, v_dim=16, mesh=mesh_of(1)), (k,), (k,))


def test_a_traced_v_dim_is_refused_with_a_hint():
    q, k, _ = arrays()
    with pytest.raises(ValueError, match=r"v_dim must be an int .* static_argnums"):
        jax.jit(lambda n: attend_block(q, k, v_dim=n))(16)
