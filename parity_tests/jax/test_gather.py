"""gather and gather_token in JAX: gradients of what all ranks compute alike, and calls where their axis is missing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ring_attn_jax import from_layout, gather, gather_token, loss, merge_ring, ring_attention, to_layout

from .models import REPLICATED
from .ring import SEQ, mesh_of

LENGTH = 13


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_that_all_ranks_compute_alike_count_once_if_jax_knows_it(check_vma):
    x = np.random.default_rng(4).standard_normal((3, LENGTH, 2, 3), np.float32)
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
