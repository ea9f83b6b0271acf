"""gather and gather_token in JAX: whole sequences and single tokens on every rank, and the gradients of the shards."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ring_attn_jax import TracedLayout, from_layout, gather, gather_token, loss, merge_ring, ring_attention, to_layout

from ..support.gathered import DEALT, LENGTH, ROWS, sequence
from ..support.selection import first
from .models import REPLICATED
from .ring import SEQ, mesh_of

FIRST = PartitionSpec("seq")


@pytest.mark.parametrize(
    ("ranks", "layout"),
    first([(3, TracedLayout.of(DEALT)), (2, "contiguous"), (3, DEALT), (1, "zigzag"), (4, "zigzag"), (4, "striped")], 2),
)
def test_every_rank_gets_the_whole_and_its_shard_the_sum_of_the_cotangents(ranks, layout):
    """Each rank multiplies the whole by a cotangent of its own; what padding holds is NaN, and may not matter."""
    x, dwhole, dtoken = sequence(ranks)
    ring = {"layout": layout, "length": LENGTH}

    def program(x, mask, ids, dwhole, dtoken):
        whole, gradient = jax.vjp(partial(gather, **ring), x)
        rows, of_rows = jax.vjp(lambda x: gather_token(x, jnp.asarray(ROWS), **ring), x)
        last = gather_token(x, **ring), gather_token(x, LENGTH - 1, **ring)
        held = whole, gather(mask, **ring), gather(ids, **ring), *last, rows
        sums = (jax.lax.psum(dy[0], "seq") for dy in (dwhole, dtoken))
        return held, [of(dy)[0] for of, dy in zip((gradient, of_rows), sums, strict=True)]

    there = lambda x, pad: to_layout(jnp.asarray(x), layout, ranks, pad_value=pad)
    specs = (SEQ, SEQ, SEQ, FIRST, FIRST), (REPLICATED, SEQ)
    step = jax.jit(jax.shard_map(program, mesh=mesh_of(ranks), in_specs=specs[0], out_specs=specs[1]))
    given = there(x, jnp.nan), there(x > 0, False), there((x * 100).astype(np.int32), 0)
    (whole, mask, ids, last, same, rows), gradients = step(*given, dwhole, dtoken)
    for got, expected in ((whole, x), (mask, x > 0), (ids, (x * 100).astype(np.int32)), (last, x[:, -1]), (same, x[:, -1])):
        np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(rows, [x[0, 12], x[1, 3], 0 * x[2, 0]])
    expected = np.zeros_like(x)
    expected[0, 12], expected[1, 3] = dtoken.sum(0)[:2]
    for gradient, truth in zip(gradients, (dwhole.sum(0), expected), strict=True):
        np.testing.assert_allclose(from_layout(gradient, layout, ranks, LENGTH), truth, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
def test_what_all_ranks_compute_alike_counts_once_where_jax_knows_it(check_vma):
    x, *_ = sequence(4)
    shards = to_layout(jnp.asarray(x), "zigzag", 4)
    objective = lambda x: jnp.sin(gather(x, length=LENGTH)).sum() + jnp.sin(gather_token(x, length=LENGTH)).sum()
    ring = jax.shard_map(jax.grad(objective), mesh=mesh_of(4), in_specs=SEQ, out_specs=SEQ, check_vma=check_vma)
    got = from_layout(jax.jit(ring)(shards), "zigzag", 4, LENGTH)
    expected = np.cos(x) * (1 + (np.arange(LENGTH) == LENGTH - 1))[:, None, None]
    np.testing.assert_allclose(got, expected * (1 if check_vma else 4), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("call", [gather, gather_token])
def test_a_call_outside_shard_map_is_refused(call):
    with pytest.raises(ValueError, match=f"'seq' is not a mesh axis here: call {call.__name__} inside"):
        call(jnp.ones((1, 6)))


CALLS = {
    "ring_attention": lambda x: ring_attention(x, x, x),
    "gather": gather,
    "loss": lambda x: loss(x[:, :, 0], x[:, :, 0, 0].astype(int)),
    "merge_ring": lambda x: merge_ring((x, x[..., 0])),
}


@pytest.mark.pairs
@pytest.mark.parametrize("axes", [("ring",), ("rows", "ring")], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_an_axis_that_the_shard_map_lacks_is_refused_with_those_it_has(name, axes):
    mesh = jax.make_mesh((1,) * len(axes), axes, axis_types=(jax.sharding.AxisType.Auto,) * len(axes))
    call = jax.shard_map(CALLS[name], mesh=mesh, in_specs=REPLICATED, out_specs=REPLICATED, check_vma=False)
    names = {1: "this shard_map is over ring: pass axis_name='ring'", 2: "over rows, ring: pass axis_name='rows' or 'ring'"}
    with pytest.raises(ValueError, match=rf"axis_name='seq' is not a mesh axis here, .*{names[len(axes)]}(\n|$)"):
        jax.eval_shape(call, jnp.ones((1, 8, 2, 4)))
