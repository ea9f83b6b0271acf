"""Tests of XLA's schedule of a ring of 8 GPUs, compiled on one: hops run beside kernels, and memory does not grow."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental import topologies

from ring_attn_jax import causal, ring_attention

from ..jax import ring as on_jax

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="JAX has no GPU"),
]
TWO_HOPS = {"xla_gpu_experimental_parallel_collective_overlap_limit": "2"}


def compiled(ranks: int, strategy: str, backward: bool) -> Any:
    """Return the program of a causal call of 2,048 tokens a rank, compiled for ``ranks`` GPUs like this one."""
    devices = topologies.get_topology_desc(platform="cuda", topology=f"1x1x{ranks}").devices
    mesh = jax.sharding.Mesh(np.array(devices), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    shape = lambda heads: jax.ShapeDtypeStruct(
        (1, 2048 * ranks, heads, 128), jnp.bfloat16, sharding=jax.NamedSharding(mesh, on_jax.SEQ)
    )
    attend = partial(ring_attention, mask=causal(), strategy=strategy)
    ring: Any = jax.shard_map(attend, mesh=mesh, in_specs=(on_jax.SEQ,) * 3, out_specs=on_jax.SEQ)

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
        return jax.vjp(ring, q, k, v)[1](dout)

    arrays = (shape(2), shape(1), shape(1), shape(2)) if backward else (shape(2), shape(1), shape(1))
    return jax.jit(gradients if backward else ring).lower(*arrays).compile(compiler_options=TWO_HOPS)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("strategy", ["ring", "two_way"])
def test_every_hop_of_a_ring_of_8_runs_beside_a_kernel(strategy, backward):
    """Only the last hop of the gradients, after which no kernel is left, may be synchronous; nothing large is copied."""
    text = compiled(8, strategy, backward).as_text()
    starts = [line for line in text.splitlines() if re.search(r"= .*collective-permute-start\(", line)]
    synchronous = re.findall(r"= \S+ collective-permute\(", text)
    assert len(starts) + len(synchronous) >= (14 if backward else 7)  # XLA may join the hops of keys and of gradients
    assert not [line for line in starts if '"is_sync":true' in line]
    assert len(synchronous) <= backward
    spans = re.findall(r"collective-permute-start\(.*?collective-permute-done\(", text[text.index("ENTRY") :], re.DOTALL)
    assert spans
    assert all("custom-call(" in span for span in spans), "a hop without a kernel beside it"
    assert not re.findall(r"= (?:bf16|f32)\S* copy\(", text[text.index("ENTRY") :])


@pytest.mark.parametrize(("strategy", "growth"), [("ring", 1), ("two_way", 1.1)])
def test_memory_does_not_grow_with_the_ring(strategy, growth):
    """From 8 to 16 ranks, the tokens of a rank unchanged; an order of hops may keep one more shard of keys."""
    bytes_of = [compiled(ranks, strategy, True).memory_analysis().temp_size_in_bytes for ranks in (8, 16)]
    assert bytes_of[1] <= growth * bytes_of[0] + 2**20
