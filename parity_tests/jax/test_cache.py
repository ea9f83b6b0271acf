"""KVCache and prefill in JAX: stories of requests against a model, one token at a time."""

# pyright: reportCallIssue=false, reportFunctionMemberAccess=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from ring_attn_jax import CacheSizes, KVCache, prefill

from ..support.selection import first
from .caches import compiled
from .ring import mesh_of

SIZES = CacheSizes(2, 2, 8)


def small(**changes: Any) -> KVCache:
    return KVCache.make(SIZES, 2, **{"capacity": 8, "dtype": "float32", "mesh": mesh_of(2)} | changes)


def on_ring(function: Any, cache: KVCache) -> KVCache:
    """``function`` of the cache inside a shard_map over its ring."""
    mesh: Any = cache.positions.sharding
    ring = jax.shard_map(function, mesh=mesh.mesh, in_specs=(cache.specs,), out_specs=cache.specs)
    return compiled(ring)(cache)


def filled(cache: KVCache, tokens: int) -> KVCache:
    """With ``tokens`` tokens of each request that every rank computes; k and v are their positions."""

    def appended(cache: KVCache) -> KVCache:
        step = cache.step(tokens)
        new = jnp.broadcast_to(step.positions[..., None, None].astype(jnp.float32), (2, tokens, 2, 8))
        return cache.append(0, new, new, step).append(1, new, new, step).advance(step)

    return on_ring(appended, cache)


@pytest.mark.slow
@pytest.mark.parametrize("axes", first([AxisType.Explicit, AxisType.Auto]), ids=str)
def test_between_steps_whole_arrays_are_enough(axes):
    cache = filled(small(mesh=jax.make_mesh((2,), ("seq",), axis_types=(axes,), devices=jax.devices()[:2])), 5)
    assert cache.counts.tolist() == [[3, 2], [3, 2]]
    assert cache.positions.tolist() == [[0, 2, 4, -1, 1, 3, -1, -1]] * 2
    with pytest.raises(ValueError, match="request 0 has 5 tokens, and 4 more exceed the capacity of 8"):
        cache.check_room(4)
    with pytest.raises(ValueError, match="rank 0 has 3 of its 4 slots of request 1 in use, and holds 2"):
        cache.check_room([0, 3], "contiguous")
    with pytest.raises(ValueError, match="fixed capacity"):
        cache.reserve(9)
    back = cache.check_room(3).rollback([5, 2]).fork(1, 0)
    assert back.counts.tolist() == [[1, 1], [1, 1]] and cache.counts.tolist() == [[3, 2], [3, 2]]
    assert back.evict(0).lengths.tolist() == [0, 2]
    assert not back.evict(0).k[:, 0].any()


def test_pages_are_added_and_nothing_is_lost():
    cache = filled(small(capacity=4, page=2), 4)
    grown = cache.reserve(2)
    assert (cache.spec.slots, grown.spec.slots) == (2, 4)
    assert grown.positions.tolist() == [[0, 2, -1, -1, 1, 3, -1, -1]] * 2
    assert grown.k.sharding == cache.k.sharding
    grown = filled(grown, 3)
    assert grown.positions.tolist() == [[0, 2, 4, 6, 1, 3, 5, -1]] * 2
    assert grown.k[1, 0, :, 0, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 0]


def test_a_window_refuses_what_it_cannot_go_back_to():
    cache = filled(filled(small(capacity=None, window=4, room=3), 3), 3)
    assert cache.rollback([3, 6]).lengths.tolist() == [3, 6]
    with pytest.raises(ValueError, match="request 0 was 6 tokens long and shall go back to 2: this cache has room for 3"):
        cache.rollback([2, 6])


def test_a_cache_is_donated_and_a_step_of_one_token_compiles_once():
    cache = small()

    def one(cache: KVCache) -> KVCache:
        step, new = cache.step(), jnp.ones((2, 1, 2, 8))
        return cache.append(0, new, new, step).append(1, new, new, step).advance(step)

    step = jax.jit(jax.shard_map(one, mesh=mesh_of(2), in_specs=(cache.specs,), out_specs=cache.specs), donate_argnums=0)
    where = cache.k.addressable_shards[0].data.unsafe_buffer_pointer()
    for _ in range(3):
        cache = step(cache)
    assert cache.lengths.tolist() == [3, 3]
    assert cache.k.addressable_shards[0].data.unsafe_buffer_pointer() == where
    assert step._cache_size() == 1


def prefilled(cache: KVCache, lengths: Any = None, dtype: Any = jnp.float32, **arguments: Any) -> KVCache:
    options = {name: arguments.pop(name) for name in ("fresh", "layout", "tokens") if name in arguments}
    step = cache.prefill_step(options.pop("tokens", 2), **options, lengths=lengths)
    return prefill(jnp.ones((2, 2, 4, 8), dtype), *[jnp.ones((2, 2, 2, 8), dtype)] * 2, cache, 0, step, **arguments)[1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cache: cache.step(0), "tokens must be an int of at least 1"),
        (lambda cache: cache.step(2, valid=jnp.ones((2, 2))), r"valid must be bool \[requests, tokens\] = \[2, 2\]"),
        (lambda cache: cache.check_room(1), "check_room reads the cache on the host, and here it is traced"),
        (lambda cache: prefilled(cache, [1, 5]), r"lengths\[1\]=5: it must be 0 to 4, what the shards hold"),
        (lambda cache: prefilled(cache, jnp.ones(3, int)), r"lengths must be integers \[2\], one for every request"),
        (lambda cache: prefilled(cache, tokens=3), "zigzag over 2 ranks needs an even number"),
        (lambda cache: prefilled(cache, layout="spiral"), "unknown layout 'spiral'"),
        (lambda cache: prefilled(cache, dtype=jnp.bfloat16), "k and v are bfloat16, and a cache of float32 takes float32"),
        (lambda cache: prefilled(cache, length=9), 'length=9 goes with order="global": leave it out'),
        (lambda cache: prefilled(cache, alibi_slopes=jnp.ones(4)), "alibi_slopes and a request that has tokens already"),
        (lambda cache: prefilled(cache, window=-1), "window must be an int of at least 0"),
        (lambda cache: prefilled(cache, sinks=jnp.zeros(1)), r"sinks must be \[heads\] = \[4\]"),
        (lambda cache: cache.step(valid=[[True], [True]]), r"valid must be bool \[requests, tokens\] = \[2, 1\], .* got list"),
        (lambda cache: cache.step(rows=[]), "rows names no request"),
        (lambda cache: cache.rollback(cache.lengths * 1.5), r"lengths must be integers \[2\], .* got float32 \[2\]"),
        (lambda cache: cache.rollback(cache.lengths[:1]), r"lengths must be integers \[2\]"),
        (lambda cache: cache.append(np.int64(-1), *[jnp.ones((2, 1, 2, 8))] * 2, cache.step()), "layer=-1 is not one of"),
        (lambda cache: cache.append(2, *[jnp.ones((2, 1, 2, 8))] * 2, cache.step()), "layer=2 is not one of the cache's 2"),
    ],
)
def test_invalid_arguments_are_refused_when_they_are_traced(call, message):
    with pytest.raises(ValueError, match=message):
        on_ring(lambda cache: call(cache) and cache, small())


def test_a_step_that_stops_leaves_no_scale_and_given_ones_can_divide():
    def stopped(cache: KVCache) -> KVCache:
        for value in (1e6, 1.0):
            step, new = cache.step(), jnp.full((2, 1, 2, 8), value)
            cache = cache.append(0, new, new, step).append(1, new, new, step)
        cache = cache.advance(step)
        new = jnp.full((2, 1, 2, 8), 1e6)
        return cache.append(0, new, new, cache.step())

    assert (on_ring(stopped, small(dtype="float8_e4m3fn")).k_scale == 2.0**-8).all()
    ones = jnp.ones((2, 2))
    for wrong, message in ((ones * 0, r"k_scale\[0, 0\]=0.0: .* must be finite and above 0"), ([[1.0]], "got list")):
        with pytest.raises(ValueError, match=message):
            small(dtype="float8_e4m3fn", k_scale=wrong, v_scale=ones)


@pytest.mark.parametrize(("ranks", "begun"), first([(2, "chunk"), (2, "step"), (1, "chunk"), (1, "step")], 0, 2))
def test_a_step_without_a_token_leaves_no_scale(ranks, begun):
    """Check that a request has the bits that it has alone, for any values without a token and any rank of its first token."""

    def written(cache: KVCache, step: Any, value: float) -> KVCache:
        real = jnp.broadcast_to((step.positions >= 0)[..., None, None], (*step.positions.shape, 2, 8))
        new = jnp.where(real, value, 1e6)
        return cache.append(0, new, new, step).append(1, new, new, step).advance(step)

    def empty_steps(cache: KVCache) -> KVCache:
        cache = written(cache, cache.step(2, valid=jnp.zeros((2, 2), bool)), 1.0)
        cache = written(cache, cache.prefill_step(2, "contiguous", jnp.zeros(2, jnp.int32)), 1.0)
        return written(cache, cache.step(1, valid=jnp.zeros((1, 1), bool), rows=[1]), 1.0)

    def continued(cache: KVCache, new: list[int]) -> KVCache:
        if begun == "chunk":
            cache = written(cache, cache.prefill_step(2, "contiguous", jnp.asarray(new)), 1.0)
        cache = written(cache, cache.step(1, valid=jnp.asarray(new, bool)[:, None]), 1.0)
        return written(cache, cache.step(1, valid=jnp.asarray(new, bool)[:, None]), 3.0)

    two, one = (KVCache.make(SIZES, n, 8, dtype="float8_e4m3fn", mesh=mesh_of(ranks)) for n in (2, 1))
    late = on_ring(lambda cache: continued(empty_steps(cache), [0, 1]), two)
    alone = on_ring(lambda cache: continued(cache, [1]), one)
    assert (alone.k_scale == 2.0**-8).all()
    for name, dim in {"k": 1, "v": 1, "positions": 0, "counts": 0, "lengths": 0, "owners": 0}.items():
        np.testing.assert_array_equal(np.asarray(getattr(late, name)).take([1], dim), getattr(alone, name), err_msg=name)
    np.testing.assert_array_equal(late.k_scale, alone.k_scale)
    np.testing.assert_array_equal(late.v_scale, alone.v_scale)


def test_lengths_to_go_back_to_that_are_traced_are_not_below_0():
    back = jax.jit(lambda cache, lengths: cache.rollback(lengths))(filled(small(), 5), jnp.array([-3, 2]))
    assert (back.lengths.tolist(), back.counts.tolist(), back.lengths.dtype) == ([0, 2], [[0, 0], [1, 1]], jnp.int32)


def test_a_cache_needs_a_mesh_or_a_shard_map():
    with pytest.raises(ValueError, match="axis_name='data' is not an axis of the mesh, which has 'seq'"):
        small(axis_name="data")
    with pytest.raises(ValueError, match=r"'seq' is not a mesh axis here: call KVCache.make inside .* or pass mesh="):
        small(mesh=None)
    made = jax.shard_map(lambda: small(mesh=None), mesh=mesh_of(2), in_specs=(), out_specs=small().specs)()
    assert made.k.shape == small().k.shape
