"""Summary attention in JAX: out, lse and every gradient against float64; what leaks, what is refused."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from ring_attn_jax import SummaryAttention, from_numpy, ring_attention, sharded_summary_attention, summary_attention, to_numpy

from ..support.models import LENGTH, layer_data
from ..support.selection import first
from ..support.summaries import (
    CASES,
    EXACT,
    MEAN,
    MORE,
    REFUSED,
    SUMMARY_LAYER,
    SummaryCase,
    check_summary_layer,
    refused,
    summary_weights,
)
from .ring import QUICK, SEQ, mesh_of

REPLICATED = PartitionSpec()
QUICKLY = QUICK if jax.default_backend() == "cpu" else None
RINGS = [CASES[i] for i in (3, 0, 5, 1, 2)]
"""Rings of 3, 4, 8, 1 and 2 ranks; make test has the first."""


@lru_cache(maxsize=64)
def run(case: SummaryCase) -> list[Any]:
    """out, lse, dq, dk, dv as whole arrays, padding included, and dpool."""
    with jax.enable_x64(case.dtype == "float64"):
        arrays = {name: jnp.asarray(x) for name, x in case.padded().items()}
        qkv = [arrays[name].astype(case.dtype) for name in ("q", "k", "v", "pool") if name in arrays]
        cotangents = arrays["dout"].astype(case.dtype), arrays["dlse"]
        results = list(program(case)(qkv, arrays.get("key_mask"), cotangents))
        wide = jnp.float64 if case.dtype == "float64" else jnp.float32
        return [*(np.asarray(x.astype(wide)) for x in results), *[None] * (case.pooling == MEAN)]


@lru_cache(maxsize=64)
def program(case: SummaryCase):
    attend = partial(sharded_summary_attention, mesh=mesh_of(case.ranks), **case.options, return_lse=True)

    def results(arrays, key_mask, cotangents):
        total, vjp = jax.vjp(lambda *arrays: attend(*arrays, key_mask=key_mask), *arrays)
        return *total, *vjp(cotangents)

    return jax.jit(results, compiler_options=QUICKLY)


@pytest.mark.slow
@pytest.mark.parametrize("case", first(RINGS), ids=str)
def test_out_lse_and_all_gradients_are_as_near_to_float64_as_one_devices(case):
    case.check(run(case))


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in [*CASES, *EXACT, *MORE] if case not in RINGS], ids=str)
def test_more_of_them_are(case):
    case.check(run(case))


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [EXACT[0], pytest.param(EXACT[1], marks=pytest.mark.full)], ids=str)
def test_where_it_represents_every_token_it_is_exact_attention(case):
    given = [jnp.asarray(case.arrays[name]) for name in "qkv"]
    attend = partial(ring_attention, layout="contiguous", key_mask=case.arrays.get("key_mask"))
    sharded = jax.shard_map(attend, mesh=mesh_of(1), in_specs=(SEQ,) * 3, out_specs=SEQ)
    exact = jax.jit(sharded, compiler_options=QUICKLY)(*given)
    out, *_ = run(case)
    np.testing.assert_allclose(out[:, : case.length], exact, rtol=0, atol=2e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [CASES[0], CASES[5]], ids=str)
def test_later_tokens_change_nothing_on_any_rank(case):
    """To the bit, with every token from one on changed: within a block, and at its start."""
    out = lambda case: run.__wrapped__(case)[0]
    before = out(case)
    for token in (20, 23, 26):
        later = lambda x, token=token: np.concatenate([x[:, :token], -3 * x[:, token:]], 1)
        after = out(case.given(**{name: later(case.arrays[name]) for name in "qkv"}))
        np.testing.assert_array_equal(before[:, :token], after[:, :token])
        assert (before[:, token : case.length] != after[:, token : case.length]).any()


@pytest.mark.exhaustive
def test_inside_a_shard_map_that_checks_nothing_the_pools_gradient_is_a_ranks_part():
    case = SummaryCase()
    arrays = {name: jnp.asarray(x) for name, x in case.padded().items()}

    def gradient(q, k, v, pool, dout, dlse):
        total, vjp = jax.vjp(lambda pool: summary_attention(q, k, v, pool, **case.options, return_lse=True), pool)
        (dpool,) = vjp((dout, dlse))
        return jax.lax.psum(dpool, "seq")

    specs = SEQ, SEQ, SEQ, REPLICATED, SEQ, SEQ
    sharded = jax.shard_map(gradient, mesh=mesh_of(4), in_specs=specs, out_specs=REPLICATED, check_vma=False)
    got = jax.jit(sharded, compiler_options=QUICKLY)(*(arrays[name] for name in ("q", "k", "v", "pool", "dout", "dlse")))
    expected = case.expected.dpool
    assert expected is not None
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) <= case.allowed("dpool")


@pytest.mark.exhaustive
def test_batch_and_heads_may_be_sharded_too():
    case = SummaryCase(2, block=5)
    mesh = jax.make_mesh((2, 2, 2), ("data", "seq", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    attend = partial(sharded_summary_attention, mesh=mesh, batch_axes="data", head_axis="tensor", **case.options)
    arrays = [jnp.asarray(case.padded()[name]) for name in ("q", "k", "v", "pool")]
    out = jax.jit(attend, compiler_options=QUICKLY)(*arrays)
    np.testing.assert_allclose(out[:, : case.length], case.expected.out, rtol=0, atol=2e-6)


@pytest.mark.slow
def test_the_layer_is_right_in_every_weight():
    ranks, weights, (x, dout) = 2, summary_weights(), layer_data()
    layer = SummaryAttention(**SUMMARY_LAYER, rngs=nnx.Rngs(0))
    graph, state = nnx.split(from_numpy(layer, weights), nnx.Param)
    pad = lambda x: jnp.pad(x, ((0, 0), (0, -LENGTH % ranks), (0, 0)))

    def forward(state, x):
        return nnx.merge(graph, state)(x, length=LENGTH)

    def results(state, x, dout):
        sharded = jax.shard_map(forward, mesh=mesh_of(ranks), in_specs=(REPLICATED, SEQ), out_specs=SEQ)
        out, vjp = jax.vjp(sharded, state, x)
        return out, *vjp(dout)

    out, gradients, dx = jax.jit(results, compiler_options=QUICKLY)(state, pad(x), pad(dout))
    nnx.update(layer, gradients)
    got = {"out": np.asarray(out)[:, :LENGTH], "dx": np.asarray(dx)[:, :LENGTH], **to_numpy(layer)}
    check_summary_layer(got, weights, x, dout)


@pytest.mark.exhaustive
def test_a_layer_on_a_mesh_is_the_one_on_a_ring_of_one():
    x = jnp.pad(layer_data()[0], ((0, 0), (0, -LENGTH % 2), (0, 0)))
    layers = [SummaryAttention(**SUMMARY_LAYER, mesh=mesh_of(ranks), rngs=nnx.Rngs(0)) for ranks in (1, 2)]
    out, on_mesh = (jax.jit(lambda x, own=from_numpy(layer, summary_weights()): own(x, length=LENGTH))(x) for layer in layers)
    np.testing.assert_allclose(on_mesh, out, rtol=0, atol=1e-6)


def test_one_summary_starts_as_the_mean_and_several_start_apart():
    make = partial(SummaryAttention, 8, 2, block=4, window=3, rngs=nnx.Rngs(0))
    one, two = make().pool, make(summaries=2).pool
    assert one is not None and not one[...].any()
    assert two is not None and (two[0] != two[1]).any()
    assert make(pooling=MEAN).pool is None
    with pytest.raises(ValueError, match="summaries must be an int of at least 1"):
        make(summaries=0)
    with pytest.raises(ValueError, match=r"x must be \[batch, tokens, 8\], got \[1, 8\]"):
        make()(jnp.ones((1, 8)))


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_what_does_not_fit_is_refused(change, message):
    arrays, options = refused(change)
    arrays = {name: x if x is None else jnp.asarray(x) for name, x in arrays.items()}
    with pytest.raises(ValueError, match=message):
        sharded_summary_attention(**arrays, **options, mesh=mesh_of(1))


def test_what_is_no_array_is_refused_and_a_call_outside_a_shard_map():
    arrays, options = refused({})
    for name, what in (("q", "q, k and v"), ("pool", "pool")):
        with pytest.raises(ValueError, match=f"{what} must be .*array.*, got list"):
            sharded_summary_attention(**arrays | {name: [1.0]}, **options, mesh=mesh_of(1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="axis_name='seq' is not a mesh axis here"):
        summary_attention(**arrays, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("asked", [{"block": 2**40, "window": 1}, {"block": 4, "window": 2**40}], ids=str)
def test_blocks_and_windows_of_more_tokens_than_int32_counts_are_exact_attention(asked):
    q, k, v = (jnp.asarray(x) for x in np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4), np.float32))
    attend = partial(sharded_summary_attention, mesh=mesh_of(1), pooling=MEAN)
    np.testing.assert_array_equal(attend(q, k, v, **asked), attend(q, k, v, block=4, window=8))


def test_no_rows_give_no_rows():
    q = jnp.ones((0, 8, 2, 4))
    assert sharded_summary_attention(q, q, q, mesh=mesh_of(1), pooling=MEAN, block=2, window=1).shape == q.shape
