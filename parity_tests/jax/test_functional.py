"""functional.dot_product_attention is jax.nn's over a ring, or says by name what it refuses."""

# pyright: reportArgumentType=false

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import ring_attn_jax
from ring_attn_core.reference.tolerance import UNIT_ROUNDOFF
from ring_attn_jax import from_layout, functional, to_layout

from ..support.functional import Call, assembled
from ..support.selection import first
from .functional import PLACES, Place, draw, original, run
from .ring import QUICK, REPLICATED, SEQ, mesh_of

SOME, ALL = range(3), range(300)


def assert_exact_or_refused(seed: int, ranks: int | None) -> None:
    call, place, is_traced = draw(seed, ranks)
    if call.refused and not is_traced:
        with pytest.raises(ValueError, match=call.refused):
            run(call, place, is_traced)
        return
    results = run(call, place, is_traced)
    if call.refused:
        got = without_nan(whole({name: results[name] for name in ("out", "lse")}, place), call)
    else:
        got = whole(results, place)
    lse = got.pop("lse")
    call.check(got)
    exact = call.attention(plain=False)["lse"]
    roundoff = {"float32": UNIT_ROUNDOFF["float32"], "bfloat16": 2.0**-9, "float16": 2.0**-12}[call.dtype]
    if not call.refused:
        np.testing.assert_allclose(lse, exact, rtol=8 * roundoff, atol=8 * roundoff)


def whole(results: dict[str, np.ndarray], place: Place) -> dict[str, np.ndarray]:
    lengths = dict(zip(("out", "lse", "dq", "dk", "dv"), (*[place.queries] * 3, *[place.keys] * 2), strict=True))
    ranks = place.ranks or 1
    return {name: assembled(np.split(x, ranks, 1), place.layout, lengths[name]) for name, x in results.items()}


def without_nan(got: dict[str, np.ndarray], call: Call) -> dict[str, np.ndarray]:
    """out, which is NaN for some queries, whose mask is unknown to the program, and exact for the others."""
    wrong = np.isnan(got["out"]).all((2, 3))
    assert wrong.any()
    assert (np.isnan(got["out"]).any((2, 3)) == wrong).all()
    exact = call.attention(plain=False)["out"]
    return {"lse": got["lse"], "out": np.where(wrong[..., None, None], exact, got["out"])}


@pytest.mark.parametrize("ranks", first([2, None, 4]))
def test_random_calls_are_exact_or_refused_by_name(ranks):
    for seed in SOME:
        assert_exact_or_refused(seed, ranks)


@pytest.mark.campaign
@pytest.mark.parametrize("seeds", [range(i, i + 25) for i in range(0, 300, 25)], ids=str)
@pytest.mark.parametrize("ranks", list(PLACES))
def test_three_hundred_calls_are_exact_or_refused_by_name(ranks, seeds):
    for seed in seeds:
        try:
            assert_exact_or_refused(seed, ranks)
        except AssertionError as error:
            raise AssertionError(f"draw {seed}: {error}\n{draw(seed, ranks)[0].arguments}") from error


@pytest.mark.parametrize("seeds", first([range(6), ALL], 1, 1, "campaign"), ids=len)
def test_our_exact_results_are_those_of_jaxs_own_function(seeds):
    """To its own computed bound, in float32."""
    for seed in seeds:
        call, _, is_traced = draw(seed, None)
        if not call.refused and call.dtype == "float32":
            call.check(original(call, is_traced))


def test_every_kind_of_call_is_drawn():
    draws = [draw(seed, None) for seed in ALL]
    computed = [(call, is_traced) for call, _, is_traced in draws if not call.refused]
    assert len(computed) > 0.7 * len(draws)
    assert {(name, is_traced) for call, is_traced in computed for name in call.arguments} == {
        (name, is_traced)
        for name in inspect.signature(jax.nn.dot_product_attention).parameters
        if name not in ("query", "key", "value", "bias", "return_residual")
        for is_traced in (False, True)
    }
    assert len({(call.refused, is_traced) for call, _, is_traced in draws if call.refused}) == 6


def test_the_signature_is_jaxs_with_the_ring_behind():
    ours, theirs = (inspect.signature(x).parameters for x in (functional.dot_product_attention, jax.nn.dot_product_attention))
    assert list(ours) == [*theirs, "axis_name", "layout", "length", "kv_length"]
    assert all(ours[name].default == p.default and ours[name].kind == p.kind for name, p in theirs.items())
    assert ring_attn_jax.functional is functional


def arrays(batch: int = 2, dtype: str = "float32") -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (batch, 8, heads, 8), dtype) for key, heads in zip(keys, (4, 2, 2), strict=True)]


def alone(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> Any:
    """Compute attention on one device by one program, where JAX would compile each operation."""
    return jax.jit(partial(functional.dot_product_attention, **{"axis_name": None, **options}))(q, k, v)


@pytest.mark.slow
def test_a_query_that_sees_no_key_has_out_0_and_lse_minus_infinity():
    mask = np.ones((1, 1, 8, 8), bool)
    mask[..., 3, :] = False
    out, lse = alone(*arrays(), mask=mask, return_residual=True)
    assert (out[:, 3] == 0).all()
    assert (lse[:, 3] == -jnp.inf).all()
    theirs, residual = jax.jit(partial(jax.nn.dot_product_attention, mask=mask, return_residual=True))(*arrays())
    np.testing.assert_allclose(np.delete(out, 3, 1), np.delete(theirs, 3, 1), atol=1e-6)
    np.testing.assert_allclose(np.delete(lse, 3, 1), np.delete(residual, 3, 1), atol=1e-6)


def test_tokens_beyond_the_lengths_are_padding_without_a_mesh_too():
    q, k, v = arrays()
    out, lse = alone(q, k, v, length=6, kv_length=5, return_residual=True)
    expected, residual = alone(q[:, :6], k[:, :5], v[:, :5], return_residual=True)
    np.testing.assert_allclose(out[:, :6], expected, atol=1e-6)
    np.testing.assert_allclose(lse[:, :6], residual, atol=1e-6)
    assert not out[:, 6:].any()
    assert (lse[:, 6:] == -jnp.inf).all()


@pytest.mark.parametrize("ids", [[1, 1, 2, 2, 1, 1, 3, 3], [1, 1, -1, -1, 1, 1, 1, 2]], ids=["an id again", "padding inside"])
def test_a_traced_mask_of_documents_in_parts_is_exact(ids):
    ids = jnp.array(ids)
    mask = ((ids[:, None] == ids) & (ids >= 0))[None, None]
    out, expected = jax.jit(lambda *x: [f(*x[:3], mask=x[3]) for f in (alone, jax.nn.dot_product_attention)])(*arrays(), mask)
    np.testing.assert_allclose(out[:, ids >= 0], expected[:, ids >= 0], atol=1e-6)


def test_without_a_batch_and_under_vmap_it_is_the_same():
    qkv, mask = arrays(), np.tri(8, dtype=bool)
    expected = alone(*qkv, mask=mask[None, None])
    np.testing.assert_allclose(alone(*(x[0] for x in qkv), mask=mask[None]), expected[0], atol=1e-6)
    mapped = jax.vmap(lambda q, k, v: alone(q, k, v, is_causal=True))(*qkv)
    np.testing.assert_allclose(mapped, expected, atol=1e-6)


def test_a_traced_mask_with_a_hole_gives_nan_where_it_is():
    mask = np.tri(8, dtype=bool)
    mask[5, 2] = False
    out = jax.jit(lambda *qkv, mask: alone(*qkv, mask=mask))(*arrays(), mask=mask)
    assert np.isnan(out).all((0, 2, 3)).tolist() == [i == 5 for i in range(8)]
    np.testing.assert_allclose(np.delete(out, 5, 1), np.delete(alone(*arrays(), is_causal=True), 5, 1), atol=1e-6)
    _, lse = jax.jit(lambda *qkv, mask: alone(*qkv, mask=mask, return_residual=True))(*arrays(), mask=mask)
    assert np.isnan(lse).all((0, 2)).tolist() == [i == 5 for i in range(8)]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_it_works_where_nothing_is_promoted():
    """On a mesh of Explicit axes, with a traced mask and traced lengths, forward and backward."""
    mesh = jax.make_mesh((2,), ("seq",), devices=jax.devices()[:2])
    queries, keys, mask = jnp.array([5, 8], jnp.int32), jnp.array([3, 8], jnp.int32), jnp.tri(8, dtype=bool)[None, None]
    inside = lambda q, k, v, mask, queries, keys: functional.dot_product_attention(
        q, k, v, mask=mask, query_seq_lengths=queries, key_value_seq_lengths=keys, local_window_size=(3, 1)
    )
    specs = SEQ, SEQ, SEQ, REPLICATED, REPLICATED, REPLICATED
    program = jax.shard_map(inside, mesh=mesh, in_specs=specs, out_specs=SEQ)
    summed = lambda out: (jnp.sum(out, dtype=jnp.float32), out)
    place = lambda x: jax.device_put(to_layout(x, "zigzag", 2), NamedSharding(mesh, SEQ))
    gradient = jax.jit(
        jax.grad(lambda q, k, v: summed(program(q, k, v, mask, queries, keys)), (0, 1, 2), has_aux=True), compiler_options=QUICK
    )
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        gradients, out = gradient(*map(place, arrays(dtype="bfloat16")))
    theirs = partial(jax.nn.dot_product_attention, is_causal=True, key_value_seq_lengths=keys, query_seq_lengths=queries)
    expected = theirs(*(x.astype(jnp.float32) for x in arrays(dtype="bfloat16")), local_window_size=(3, 1))
    np.testing.assert_allclose(np.float32(from_layout(out, "zigzag", 2, 8)), expected, atol=0.03)
    assert all(np.isfinite(np.float32(x)).all() and np.any(x) for x in gradients)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mask": np.ones((1, 1, 8, 7), bool)}, r"mask must be whole, .* = \[2, 4, 8, 8\]"),
        ({"mask": np.ones((8, 8))}, "mask must be bool"),
        ({"mask": True}, "mask must be whole"),
        ({"local_window_size": (1, 2, 3)}, "local_window_size must be an int"),
        ({"local_window_size": 1.5}, "local_window_size must be an int"),
        ({"query_seq_lengths": jnp.ones(3, jnp.int32)}, r"query_seq_lengths must be integers \[batch\] = \[2\]"),
        ({"key_value_seq_lengths": jnp.ones(2)}, "key_value_seq_lengths must be integers"),
        ({"implementation": "mosaic"}, "implementation='mosaic' has no counterpart"),
        ({"length": 9}, "length=9 is more than"),
        ({"layout": "zigzagged"}, "unknown layout"),
        ({"scale": "1"}, "scale must be"),
        ({"is_causal": "False"}, "is_causal must be True or False, got 'False'"),
        ({"return_residual": 1}, "return_residual must be True or False, got 1"),
        ({"axis_name": "seq"}, "axis_name='seq' is not a mesh axis here: .*pass axis_name=None for one device"),
    ],
)
def test_wrong_arguments_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        alone(*arrays(), **arguments)


def test_arrays_of_other_dimensions_are_named():
    q, k, v = arrays()
    with pytest.raises(ValueError, match=r"key must be \[batch, tokens, heads, head_dim\]"):
        alone(q, k[0], v)


def test_a_mask_of_a_longer_ring_is_whole_on_every_rank():
    """Check that shards refuse a mask of their own size."""
    inside = partial(functional.dot_product_attention, mask=np.ones((4, 4), bool))
    mapped = jax.shard_map(inside, mesh=mesh_of(2), in_specs=PartitionSpec(None, "seq"), out_specs=SEQ)
    with pytest.raises(ValueError, match=r"mask must be whole, in natural order, .* \[2, 4, 8, 8\]"):
        jax.eval_shape(mapped, *arrays())
