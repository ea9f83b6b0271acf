"""Variants, blocks and merges in bfloat16 and float32 where JAX promotes neither dtypes nor ranks, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from ring_attn_jax import attend_block, merge_ring, sharded_dilated_attention, sharded_ring_attention, sharded_summary_attention

from ..support.selection import first
from .ring import REPLICATED
from .test_strict import check_as_usual, nothing_is_promoted  # noqa: F401  the fixture holds here too

SEEN = np.arange(16).reshape(2, 8) % 5 != 1
POOL = np.linspace(-1, 1, 8).reshape(1, 2, 4)
MESH = {"mesh": jax.make_mesh((2,), ("seq",), axis_types=(AxisType.Auto,)), "return_lse": True}

CALLS: dict[str, Callable[..., Any]] = {
    "ring": partial(sharded_ring_attention, **MESH),
    "block": attend_block,
    "dilated": partial(sharded_dilated_attention, segments=(4, 8), dilations=(1, 2), **MESH),
    "dilated, lanes with a slot too many": partial(
        sharded_dilated_attention, segments=(3, 7), dilations=(3, 7), key_mask=jnp.asarray(SEEN), **MESH
    ),
    "dilated, heads": partial(sharded_dilated_attention, segments=(4, 8), dilations=(1, 2), mixing="heads", **MESH),
    "summary, mean": partial(sharded_summary_attention, block=2, window=2, pooling="mean", key_mask=jnp.asarray(SEEN), **MESH),
    "summary, attention": lambda q, k, v: sharded_summary_attention(
        q, k, v, jnp.asarray(POOL, q.dtype), block=3, window=1, softcap=4.0, **MESH
    ),
}


@pytest.mark.parametrize("dtype", first(["bfloat16", "float32"], 0, 1))
@pytest.mark.parametrize("name", CALLS)
def test_attention_and_its_gradient_promote_nothing(name, dtype):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 8, heads, 4)), dtype) for heads in (4, 2, 2))

    def program(q, k, v):
        def objective(q, k, v):
            out, lse = CALLS[name](q, k, v)
            return jnp.square(out.astype(jnp.float32)).sum() + jnp.where(lse > -jnp.inf, lse, 0).sum()

        return jax.value_and_grad(objective, (0, 1, 2))(q, k, v)

    check_as_usual(program, q, k, v)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_pairs_of_ranks_are_merged_without_promotion(dtype):
    out, lse = jnp.ones((1, 2, 2, 4), dtype), jnp.zeros((1, 2, 2), jnp.float32)
    merged = jax.shard_map(lambda *pair: merge_ring(pair), mesh=MESH["mesh"], in_specs=REPLICATED, out_specs=REPLICATED)
    check_as_usual(merged, out, lse)
