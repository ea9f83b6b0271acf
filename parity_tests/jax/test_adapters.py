"""attention_fn: flax's attention modules over a mesh are flax's own, or say by name what they refuse."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ring_attn_core import causal, sliding_window
from ring_attn_jax import attention_fn

from ..support.selection import first
from .adapters import MASKS, NEW_NNX, REFUSED, draw, flaxs_own, over_a_mesh
from .ring import mesh_of

OTHERS = [kind for kind in MASKS if kind not in ("causal", "padding")]
"""The kinds of masks except the two that "causal padding" combines."""


@pytest.mark.parametrize("seeds", first([range(len(MASKS)), range(len(MASKS), 30)], 0, 1, "campaign"), ids=["first", "others"])
@pytest.mark.parametrize("kind", first([*OTHERS, "causal", "padding"], len(OTHERS), len(OTHERS), "campaign"))
def test_random_calls_are_flaxs_own_or_refused_by_name(kind, seeds):
    for seed in [seed for seed in seeds if MASKS[seed % len(MASKS)] == kind]:
        drawn = draw(seed)
        with jax.enable_x64(True):
            if kind in REFUSED:
                with pytest.raises(
                    ValueError, match=r"mask must be the same for all heads and, .*, one interval of keys for each"
                ):
                    over_a_mesh(drawn)
                continue
            got, expected = over_a_mesh(drawn), flaxs_own(drawn)
        assert got.keys() == expected.keys()
        for name, x in expected.items():
            distance = np.linalg.norm(got[name] - x) / max(np.linalg.norm(x), 0.01)
            assert distance < 1e-11, f"draw {seed}: {name} differs by {distance:.3g}\n{drawn}"


def test_every_keyword_that_flax_passes_is_declared():
    declared = inspect.signature(attention_fn(mesh=mesh_of(1))).parameters
    for module in (nn.MultiHeadDotProductAttention, nnx.MultiHeadAttention):
        tree = ast.parse(textwrap.dedent(inspect.getsource(module.__call__)))
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        passing = [call for call in calls if ast.unparse(call.func) in ("self.attention_fn", "dict")]
        passed = {keyword.arg for call in passing for keyword in call.keywords if keyword.arg}
        passed |= set(_items_of(tree, "attn_kwargs"))
        assert {"mask", "dropout_rng", "module", "precision"} <= passed
        assert passed <= set(declared)
    own = inspect.signature(nnx.dot_product_attention).parameters
    assert list(declared)[: len(own) - NEW_NNX] == list(own)[: len(own) - NEW_NNX]


def _items_of(tree: ast.AST, name: str) -> Iterator[str]:
    """Every key of ``name["key"]``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == name and isinstance(node.slice, ast.Constant):
            yield str(node.slice.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", first([AxisType.Explicit, AxisType.Auto]))
def test_a_module_under_jit_on_a_mesh_is_flaxs_own(kind):
    mesh = jax.make_mesh((2, 2), ("data", "seq"), axis_types=(kind, kind), devices=jax.devices()[:4])
    x = jax.random.normal(jax.random.key(0), (2, 16, 12))
    padding = (jnp.arange(16) < 13)[None, None, None]

    def gradients(module, x, mask):
        graph, weights = nnx.split(module)
        objective = lambda weights, x: (nnx.merge(graph, weights)(x, mask=mask) ** 2 * mask[0, 0, 0][:, None]).mean()
        return jax.jit(jax.value_and_grad(objective, (0, 1)))(weights, x)

    sizes = {"num_heads": 2, "in_features": 12, "decode": False}
    triangle = jnp.tri(16, dtype=bool)
    own = lambda *qkv, mask, **called: nnx.dot_product_attention(*qkv, mask=mask & triangle, **called)
    expected = gradients(nnx.MultiHeadAttention(**sizes, attention_fn=own, rngs=nnx.Rngs(0)), x, padding)
    with jax.set_mesh(mesh):
        function = attention_fn(mesh=mesh, batch_axes="data", mask=causal())
        module = nnx.MultiHeadAttention(**sizes, attention_fn=function, rngs=nnx.Rngs(0))
        sharded = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data", "seq")))
        got = gradients(module, sharded, padding)
        assert got[1][1].sharding.spec[:2] == ("data", "seq") or kind == AxisType.Auto
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", first([AxisType.Explicit, AxisType.Auto]))
def test_a_module_that_decodes_over_two_ranks_is_flaxs_own(kind):
    """Two ranks divide neither its one query nor its cache of three tokens."""
    mesh = jax.make_mesh((2,), ("seq",), axis_types=(kind,), devices=jax.devices()[:2])
    x = jax.random.normal(jax.random.key(0), (2, 3, 12))

    def decoded(**function):
        module = nnx.MultiHeadAttention(2, 12, decode=True, rngs=nnx.Rngs(0), **function)
        module.init_cache(x.shape)
        step = nnx.jit(lambda module, token: module(token))
        return jnp.concatenate([step(module, x[:, i : i + 1]) for i in range(3)], 1)

    np.testing.assert_allclose(decoded(attention_fn=attention_fn(mesh=mesh)), decoded(), atol=1e-6)


def qkv(*batch: int, tokens: int = 8) -> tuple[jax.Array, ...]:
    return tuple(jax.random.normal(key, (*batch, tokens, 2, 4)) for key in jax.random.split(jax.random.key(1), 3))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_traced_mask_that_does_not_fit_gives_nan_where_it_does_not():
    mask = np.tri(8, dtype=bool)[None, None]
    mask[..., 5, 2] = False
    out = jax.jit(lambda mask: attention_fn(mesh=mesh_of(2))(*qkv(1), mask=mask))(mask)
    expected = nn.dot_product_attention(*qkv(1), mask=mask)
    assert np.isnan(out[:, 5]).all()
    np.testing.assert_allclose(np.delete(out, 5, 1), np.delete(expected, 5, 1), atol=1e-6)


@pytest.mark.parametrize("batch", [(2, 1, 3), pytest.param((), marks=pytest.mark.exhaustive)])
def test_any_number_of_batch_dimensions(batch):
    mask = np.random.default_rng(0).random((*batch, 1, 1, 8)) < 0.8
    out, expected = (
        jax.jit(partial(f, mask=mask))(*qkv(*batch)) for f in (attention_fn(mesh=mesh_of(2)), nn.dot_product_attention)
    )
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_a_query_that_sees_no_key_gets_zero():
    out = attention_fn(mesh=mesh_of(1))(*qkv(1), mask=jnp.zeros((1, 1, 1, 8)))
    assert not out.any()


@pytest.mark.exhaustive
def test_dropout_is_the_same_on_any_mesh():
    drop = {"dropout_rng": jax.random.key(3), "dropout_rate": 0.4, "broadcast_dropout": False}
    alone, ring, other = (
        attention_fn(mesh=mesh_of(ranks))(*qkv(2), **drop | {"dropout_rng": jax.random.key(seed)})
        for ranks, seed in ((1, 3), (2, 3), (2, 4))
    )
    np.testing.assert_allclose(ring, alone, atol=1e-5)
    whole = attention_fn(mesh=mesh_of(2))(*qkv(2), **drop, deterministic=True)
    for different in (other, whole):
        assert np.abs(ring - different).max() > 0.1


@pytest.mark.exhaustive
def test_linens_dropout_goes_through():
    module = nn.MultiHeadDotProductAttention(
        2, dropout_rate=0.4, broadcast_dropout=False, deterministic=False, attention_fn=attention_fn(mesh=mesh_of(2))
    )
    x = jax.random.normal(jax.random.key(0), (2, 8, 12))
    weights = module.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)
    first, again, other = (np.asarray(module.apply(weights, x, rngs={"dropout": jax.random.key(seed)})) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 1e-3


def test_a_function_made_again_is_the_same():
    make = lambda: attention_fn(mesh=mesh_of(2), mask=sliding_window(3), layout="striped")
    assert make() == make()
    assert hash(make()) == hash(make())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"bias": jnp.zeros((1, 2, 8, 8))}, "bias is given, .*: scores take none"),
        ({"module": nnx.Module()}, "module is given, .* sow_weights=True asks for the weights"),
        ({"qk_attn_weights_einsum": jnp.einsum}, "qk_attn_weights_einsum is given"),
        ({"attn_weights_value_einsum": jnp.einsum}, "attn_weights_value_einsum is given"),
        ({"input_positions": jnp.arange(8)}, "input_positions is given"),
        ({"dropout_rate": 0.1}, "broadcast_dropout=True drops the same"),
        ({"dropout_rate": 0.1, "broadcast_dropout": False}, "needs dropout_rng"),
        ({"mask": jnp.ones((2, 1, 8, 7))}, r"mask must broadcast against \[1, 2, 8, 8\], .*, got \[2, 1, 8, 7\]"),
        ({"mask": jnp.ones((1, 1, 1, 8, 8))}, r"mask must broadcast against .*, got \[1, 1, 1, 8, 8\]"),
    ],
)
def test_unsupported_arguments_are_refused_by_name(arguments, words):
    with pytest.raises(ValueError, match=words):
        attention_fn(mesh=mesh_of(2))(*qkv(1), **arguments)


def test_a_band_and_the_mask_of_a_decoding_module_are_refused_together():
    """Its one query counts as position 0, so causal() and is_causal=True would hide all keys but the first."""
    _, k, v = qkv(1)
    q, mask = qkv(1, tokens=1)[0], jnp.ones((1, 1, 1, 8), bool)
    with pytest.raises(ValueError, match=r"mask= of attention_fn would count this query as position 0"):
        attention_fn(mesh=mesh_of(2), mask=causal())(q, k, v, mask=mask)
    with pytest.raises(ValueError, match=r"decode=True, and is_causal=True would count this query as position 0: leave it out"):
        attention_fn(mesh=mesh_of(2))(q, k, v, mask=mask, is_causal=True)
    assert jax.eval_shape(lambda: attention_fn(mesh=mesh_of(2))(q, k, v, mask=mask)).shape == q.shape


def test_axes_that_the_mesh_does_not_have_are_refused_when_the_function_is_made():
    with pytest.raises(ValueError, match="the mesh has no axis 'ring'"):
        attention_fn(mesh=mesh_of(2), axis_name="ring")
    with pytest.raises(ValueError, match="shard with to_layout"):
        attention_fn(mesh=mesh_of(2), layout="zigzag")(*qkv(1, tokens=7))
