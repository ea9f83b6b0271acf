"""The flax layers over dilated attention: dense attention of the same sparsity, flax's own modules, or refused by name."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ring_attn_core import causal, full, sliding_window
from ring_attn_core.reference.dilated import DilatedFeatures, patterns
from ring_attn_jax import DilatedRingAttention, dilated_attention_fn

from ..support.selection import first
from .ring import mesh_of
from .test_adapters import qkv

TWO: dict[str, Any] = {"segments": (3, 8), "dilations": (1, 2)}
ONE: dict[str, Any] = {"segments": (3,), "dilations": (1,)}
WHOLE: dict[str, Any] = {"segments": (64,), "dilations": (1,)}
"""One segment that covers every sequence here: all tokens attend to all."""
TOKENS = 13


MASKS = {
    "none": None,
    "padding": np.arange(TOKENS)[None, None, None] < 9,
    "rows": np.random.default_rng(0).random((2, 1, 1, TOKENS)) < 0.6,
    "both paddings": (np.arange(TOKENS) < 9)[None, None, :, None] & (np.arange(TOKENS) < 9),
    "causal": np.tri(TOKENS)[None, None],
    "causal padding": np.tri(TOKENS)[None, None] * (np.arange(TOKENS) < 9),
}
"""As flax's modules take them; those that say causal go with mask=causal() of dilated_attention_fn."""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "linen", "ranks", "chosen"),
    [
        pytest.param("none", False, 2, WHOLE, marks=pytest.mark.full),
        ("causal padding", True, 2, WHOLE),
        pytest.param("rows", True, 3, TWO, marks=pytest.mark.full),
        ("both paddings", False, 2, TWO),
        ("causal", False, 1, {"segments": (4, 30), "dilations": (1, 3), "mixing": "heads"}),
    ],
)
def test_modules_are_flaxs_with_dense_attention_of_the_same_sparsity(name, linen, ranks, chosen):
    mask, band = MASKS[name], causal() if "causal" in name else full()
    with jax.enable_x64(True):
        got = results(linen, dilated_attention_fn(mesh=mesh_of(ranks), mask=band, **chosen), mask)
        expected = results(linen, None if chosen is WHOLE else dense(chosen), mask)
    for mine, theirs in zip(got, expected, strict=True):
        assert np.linalg.norm(mine - theirs) < 1e-11 * max(np.linalg.norm(theirs), 0.01)


def dense(chosen: dict[str, Any]) -> Any:
    """An attention_fn from the definition: key j counts ``n_ij`` times for query i of a head."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: Any = None, **_: Any) -> jax.Array:
        where = np.arange(TOKENS)
        counts = patterns(DilatedFeatures(**chosen), q.shape[2], where, where).sum(0) * (1 if mask is None else mask)
        z = counts * jnp.exp(jnp.einsum("bshd,bthd->bhst", q, k) * q.shape[-1] ** -0.5)
        total = z.sum(-1, keepdims=True)
        return jnp.einsum("bhst,bthd->bshd", z / jnp.where(total > 0, total, 1), v)

    return attend


def results(linen: bool, function: Any, mask: Any) -> list[np.ndarray]:
    """Output, and gradients of the weights and of the input, of queries that see a key."""
    given: dict[str, Any] = {"dropout_rate": 0.1, "deterministic": True}  # without dropout flax's softmax is float32
    given |= {} if function is None else {"attention_fn": function}
    x, dout = np.random.default_rng(1).standard_normal((2, 2, TOKENS, 12))
    alive = np.ones((2, TOKENS, 1)) if mask is None else np.broadcast_to(np.asarray(mask).any((1, 3))[..., None], (2, TOKENS, 1))
    if linen:
        module = nn.MultiHeadDotProductAttention(2, param_dtype=jnp.float64, **given)
        weights = nn.MultiHeadDotProductAttention(2, param_dtype=jnp.float64).init(jax.random.key(0), jnp.asarray(x))
        forward: Any = lambda weights, x: module.apply(weights, x, mask=mask)
    else:
        made = nnx.MultiHeadAttention(2, 12, decode=False, param_dtype=jnp.float64, **given, rngs=nnx.Rngs(0))
        graph, weights, rest = nnx.split(made, nnx.Param, ...)
        forward = lambda weights, x: nnx.merge(graph, weights, rest)(x, mask=mask)
    out, vjp = jax.vjp(lambda weights, x: forward(weights, x) * alive, weights, jnp.asarray(x))
    return [np.asarray(leaf) for leaf in jax.tree.leaves((out, vjp(jnp.asarray(dout))))]


@pytest.mark.parametrize("kind", first([AxisType.Explicit, AxisType.Auto], 0, 1))
def test_a_module_under_jit_on_a_mesh_is_the_one_on_one_device(kind):
    mesh = jax.make_mesh((2, 2), ("data", "seq"), axis_types=(kind, kind), devices=jax.devices()[:4])
    x, padding = (
        jax.random.normal(jax.random.key(0), (2, 16, 12)),
        (jnp.arange(16) < 13)[None, None, None] & jnp.tri(16, dtype=bool),
    )

    def gradients(function, x):
        module = nnx.MultiHeadAttention(2, 12, decode=False, attention_fn=function, rngs=nnx.Rngs(0))
        graph, weights = nnx.split(module)
        objective = lambda weights, x: (nnx.merge(graph, weights)(x, mask=padding) ** 2).mean()
        return jax.jit(jax.value_and_grad(objective, (0, 1)))(weights, x)

    expected = gradients(dilated_attention_fn(mesh=mesh_of(1), mask=causal(), **TWO), x)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data", "seq")))
        got = gradients(dilated_attention_fn(mesh=mesh, batch_axes="data", mask=causal(), **TWO), sharded)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.exhaustive
def test_an_explicit_mesh_need_not_divide_the_tokens():
    mesh = jax.make_mesh((2,), ("seq",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    got, expected = (jax.jit(dilated_attention_fn(mesh=of, **ONE))(*qkv(1, tokens=7)) for of in (mesh, mesh_of(1)))
    np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.exhaustive
def test_any_number_of_batch_dimensions_and_the_flag_is_the_mask():
    function, banded = (dilated_attention_fn(mesh=mesh_of(2), mask=mask, **TWO) for mask in (full(), causal()))
    out = function(*qkv(2, 1, 3, tokens=7), is_causal=True)
    flat = banded(*(x.reshape(6, 7, 2, 4) for x in qkv(2, 1, 3, tokens=7)))
    np.testing.assert_allclose(out.reshape(flat.shape), flat, atol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_traced_mask_that_does_not_fit_gives_nan_where_it_does_not():
    mask = np.ones((1, 1, 8, 8), bool)
    mask[..., 5, 2] = False
    function = dilated_attention_fn(mesh=mesh_of(2), **TWO)
    out = jax.jit(lambda mask: function(*qkv(1), mask=mask))(mask)
    assert np.isnan(out[:, 5]).all()
    np.testing.assert_allclose(np.delete(out, 5, 1), np.delete(function(*qkv(1)), 5, 1), atol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_query_that_the_mask_shows_no_key_gets_zero():
    rows = np.ones((1, 1, 8, 1), bool)
    rows[..., 5, :] = False
    function = dilated_attention_fn(mesh=mesh_of(1), **ONE)
    out = np.asarray(function(*qkv(1), mask=rows))
    assert not out[:, 5].any()
    np.testing.assert_allclose(np.delete(out, 5, 1), np.delete(function(*qkv(1)), 5, 1), atol=1e-6)


def test_a_function_made_again_is_the_same():
    make = lambda: dilated_attention_fn(mesh=mesh_of(2), mask=sliding_window(3), segments=[3, 8], dilations=[1, 2])
    assert make() == make()
    assert hash(make()) == hash(make())
    assert make() != dilated_attention_fn(mesh=mesh_of(2), mask=sliding_window(3), **WHOLE)


HEADS = np.ones((1, 2, 8, 8), bool)
HEADS[:, 1, :, 3] = False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"bias": jnp.zeros((1, 2, 8, 8))}, "bias is given, .*: scores take none"),
        ({"dropout_rate": 0.1}, "dropout_rate=0.1: dilated attention drops no probabilities, for a query has several"),
        (
            {"mask": np.tri(8)[None, None]},
            "mask must be the same for all heads and, within mask= of dilated_attention_fn .* query 0",
        ),
        ({"mask": HEADS}, "mask must be the same for all heads"),
        ({"mask": jnp.ones((2, 1, 8, 7))}, r"mask must broadcast against \[1, 2, 8, 8\], .*, got \[2, 1, 8, 7\]"),
    ],
)
def test_unsupported_arguments_are_refused_by_name(arguments, words):
    with pytest.raises(ValueError, match=words):
        dilated_attention_fn(mesh=mesh_of(2), **TWO)(*qkv(1), **arguments)


def test_queries_and_keys_of_two_lengths_are_refused():
    q, k, v = qkv(1)
    with pytest.raises(ValueError, match="there are 8 queries and 6 keys: the segments of dilated attention are of one sequence"):
        dilated_attention_fn(mesh=mesh_of(2), **TWO)(q, k[:, :6], v[:, :6])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"segments": (3, 8), "dilations": (1,)}, "one dilation for each segment"),
        ({**TWO, "strategy": "mesh"}, "strategy"),
        ({**TWO, "axis_name": "ring"}, "the mesh has no axis 'ring'"),
    ],
)
def test_patterns_and_options_that_do_not_fit_are_refused_when_made(arguments, words):
    with pytest.raises(ValueError, match=words):
        dilated_attention_fn(mesh=mesh_of(2), **arguments)
    with pytest.raises(ValueError, match=words):
        DilatedRingAttention(12, 2, mesh=mesh_of(2), **arguments, rngs=nnx.Rngs(0))


def test_more_patterns_than_heads_are_refused():
    with pytest.raises(ValueError, match="got 3 patterns for 2 heads"):
        dilated_attention_fn(mesh=mesh_of(1), segments=(3, 8, 9), dilations=(1, 2, 3), mixing="heads")(*qkv(1))
