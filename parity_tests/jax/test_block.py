"""Blocks merged are the whole: attend_block and merge against float64, on runs of every stride, gradients through both."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ring_attn_core import Run, causal, full, sliding_window
from ring_attn_core.reference.oracle import Attention
from ring_attn_jax import attend_block, merge

from ..support.blocks import CASES, Cut, cuts
from ..support.cases import Case, check
from ..support.selection import first
from .ring import QUICK, mesh_of, patch_tiles

BLOCKS = [(case, cut) for i, case in enumerate(CASES) for cut in (*cuts()[2 - i % 3 :], *cuts()[: 2 - i % 3])]
"""Pairs of a case and a cut: every third is the first of its case, and their cuts differ."""


@pytest.mark.parametrize(("case", "cut"), first([*BLOCKS[::3], *BLOCKS[1::3], *BLOCKS[2::3]], 0, 4), ids=str)
def test_blocks_merged_are_the_whole(case: Case, cut: Cut):
    make = lambda name, dtype: jnp.asarray(case.arrays[name], dtype)
    leaves = [make(name, case.dtype) for name in "qkv"]
    features = {name: jnp.asarray(x) for name, x in case.features.items()}
    sinks = features.pop("sinks")
    cotangents = make("dout", "float32"), make("dlse", "float32")
    with patch_tiles(case):
        attention = partial(attention_in_blocks, case, cut, features)
        primal, gradients = jax.jit(lambda *leaves: pull(attention, leaves, cotangents), compiler_options=QUICK)(*leaves, sinks)
    check(case, Attention(*(np.asarray(x, np.float32) for x in (*primal, *gradients))))


def compiled(**options):
    """Return ``attend_block`` as one program, where JAX would compile each operation."""
    return jax.jit(partial(attend_block, **options))


def pull(function, inputs, cotangents):
    primal, vjp = jax.vjp(function, *inputs)
    return primal, vjp(cotangents)


def attention_in_blocks(case, cut, features, q, k, v, sinks):
    """Every block of queries over every block of keys, merged with the sink, back in natural order."""
    outs, lses = [], []
    options = {**case.scalars, "mask": case.mask, "alibi_slopes": features.get("alibi_slopes")}
    for q_run in cut.runs(q.shape[1]):
        i = np.array(q_run.positions())
        total = jnp.zeros((*q[:, i].shape[:3], v.shape[-1])), jnp.broadcast_to(sinks, q[:, i].shape[:3])
        for k_run in cut.runs(k.shape[1]):
            j = np.array(k_run.positions())
            own = {"extents": i, "key_extents": j, "key_mask": j}
            masks = {name: x[:, own[name]] for name, x in features.items() if name in own}
            total = merge(total, attend_block(q[:, i], k[:, j], v[:, j], q_run=q_run, k_run=k_run, **masks, **options))
        outs.append(total[0])
        lses.append(total[1])
    order = np.argsort([position for run in cut.runs(q.shape[1]) for position in run.positions()])
    return jnp.concatenate(outs, 1)[:, order], jnp.concatenate(lses, 1)[:, order]


@pytest.mark.slow
def test_what_a_block_holds_beyond_its_runs_is_never_read():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 8, 2, 4))
    want = compiled(mask=full())(q[:, :5], k[:, :6], v[:, :6])
    q, k, v = (x.at[:, length:].set(jnp.nan) for x, length in ((q, 5), (k, 6), (v, 6)))
    (out, lse), vjp = jax.vjp(compiled(mask=full(), q_run=Run(0, 5), k_run=Run(0, 6)), q, k, v)
    np.testing.assert_allclose(out[:, :5], want[0], atol=1e-6)
    assert (out[:, 5:] == 0).all()
    assert (lse[:, 5:] == -jnp.inf).all()
    for gradient, length in zip(vjp((jnp.ones_like(out), jnp.zeros_like(lse))), (5, 6, 6), strict=True):
        assert jnp.isfinite(gradient).all()
        assert (gradient[:, length:] == 0).all()


def test_merging_with_nothing_changes_nothing_and_gives_no_nan():
    out, lse = jax.random.normal(jax.random.key(0), (1, 3, 2, 4)), jax.random.normal(jax.random.key(1), (1, 3, 2))
    nothing = jnp.zeros_like(out), jnp.full_like(lse, -jnp.inf)
    for pair in (lambda x: (x, nothing), lambda x: (nothing, x)):
        merged, vjp = jax.vjp(jax.jit(lambda *x, pair=pair: merge(*pair(x))), out, lse)
        for mine, same in zip(merged, (out, lse), strict=True):
            np.testing.assert_allclose(mine, same, atol=1e-6)
        for gradient in vjp(jax.tree.map(jnp.ones_like, merged)):
            np.testing.assert_allclose(gradient, 1, atol=1e-6)
    assert (merge(nothing, nothing)[0] == 0).all()
    assert (merge(nothing, nothing)[1] == -jnp.inf).all()


def test_a_traced_run_compiles_nothing_anew():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 8, 2, 4))
    block = jax.jit(lambda start, length: attend_block(q, k, v, q_run=Run(start, length)))
    block(3, 8)
    with jax.no_tracing():
        moved = block(5, 6)
    for mine, plain in zip(moved, compiled(q_run=Run(5, 6))(q, k, v), strict=True):
        np.testing.assert_allclose(mine, plain, atol=1e-6)


@pytest.mark.parametrize("offset", [2**31, 2**40, -(2**40)])
def test_a_mask_beyond_every_lag_goes_with_a_traced_run(offset):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 8, 2, 4))
    block = lambda start, mask: attend_block(q, k, v, mask=mask, q_run=Run(start, 8))
    wide, plain = jax.jit(block, static_argnums=1)(3, causal(offset)), block(3, full())
    if offset < 0:  # every key is too new
        plain = jnp.zeros_like(plain[0]), jnp.full_like(plain[1], -jnp.inf)
    for mine, other in zip(wide, plain, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6)


def test_gradients_of_what_every_rank_holds_alike_are_summed_over_blocks_elsewhere():
    """q, k, v are replicated, and only the place of the block is the rank's own."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 8, 2, 4))
    at = lambda start: lambda q, k, v: attend_block(q, k, v, mask=sliding_window(5), q_run=Run(start, 8))[0]
    own = lambda q, k, v: at(jax.lax.axis_index("seq") * 3)(q, k, v)[None]
    whole = jax.sharding.PartitionSpec()
    placed = jax.shard_map(own, mesh=mesh_of(2), in_specs=whole, out_specs=jax.sharding.PartitionSpec("seq"))
    both = lambda q, k, v: jnp.stack([at(0)(q, k, v), at(3)(q, k, v)])
    np.testing.assert_allclose(jax.jit(placed)(q, k, v), jax.jit(both)(q, k, v), atol=1e-6)
    gradients = (jax.jit(jax.grad(lambda *x, f=f: jnp.sum(f(*x) ** 2), (0, 1, 2)))(q, k, v) for f in (placed, both))
    for mine, plain in zip(*gradients, strict=True):
        np.testing.assert_allclose(mine, plain, atol=1e-5)


def test_a_block_inside_shard_map_takes_its_place_from_the_rank():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 8, 2, 4))
    own = lambda q, k, v: attend_block(q, k, v, q_run=Run(jax.lax.axis_index("seq") * 4, 4))[0]
    spec = jax.sharding.PartitionSpec(None, "seq")
    whole = jax.sharding.PartitionSpec()
    placed = jax.shard_map(own, mesh=mesh_of(2), in_specs=(spec, whole, whole), out_specs=spec)
    np.testing.assert_allclose(jax.jit(placed)(q, k, v), compiled()(q, k, v)[0], atol=1e-6)
    total = lambda f: jax.jit(jax.grad(lambda *x: jnp.sum(f(*x) ** 2), (0, 1, 2)))
    gradients = (total(f)(q, k, v) for f in (placed, lambda *x: attend_block(*x)[0]))
    for mine, plain in zip(*gradients, strict=True):
        np.testing.assert_allclose(mine, plain, atol=1e-5)


def test_the_values_of_an_identity_give_the_weights_of_attention():
    q, k = (np.random.default_rng(heads).standard_normal((1, 9, heads, 8), np.float32) for heads in (4, 2))
    weights, _ = compiled(mask=causal())(q, k, np.broadcast_to(np.eye(9, dtype=np.float32)[None, :, None], (1, 9, 2, 9)))
    scores = 8**-0.5 * np.einsum("bshd,bthd->bsht", q, k.repeat(2, 2))
    exact = np.exp(np.where(np.tri(9, dtype=bool)[None, :, None], scores, -np.inf))
    exact /= exact.sum(-1, keepdims=True)
    np.testing.assert_allclose(weights, exact, rtol=0, atol=1e-6)
