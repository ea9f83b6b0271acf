"""Tests of the kernels inside a framework's programs on a GPU: CUDA graphs, torch.compile, and XLA's programs without copies."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def qkv(length=512, heads=4, kv_heads=2, dim=64, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    make = lambda h: torch.randn(1, length, h, dim, device="cuda", generator=generator).bfloat16().requires_grad_()
    return make(heads), make(kv_heads), make(kv_heads)


def step(attention, leaves):
    out = attention(*leaves)
    return out, *torch.autograd.grad(out.float().square().sum(), leaves)


@pytest.mark.parametrize("backend", ["triton", "auto"])
def test_a_cuda_graph_of_forward_and_backward_replays_with_other_inputs(backend):
    from ring_attn_torch import ring_attention

    attention = partial(ring_attention, backend=backend, dropout_rate=0.2, dropout_seed=torch.tensor(5, device="cuda"))
    leaves = qkv()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(attention, leaves)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(attention, leaves)
    others = qkv(seed=1)
    with torch.no_grad():
        for mine, other in zip(leaves, others, strict=True):
            mine.copy_(other)
    graph.replay()
    for mine, expected in zip(captured, step(attention, others), strict=True):
        assert torch.equal(mine, expected)


def test_torch_compile_gives_the_same_bits():
    from ring_attn_torch import ring_attention

    attention = partial(ring_attention, backend="triton")
    compiled = torch.compile(attention, fullgraph=True)
    for mine, expected in zip(step(compiled, qkv()), step(attention, qkv()), strict=True):
        assert torch.equal(mine, expected)


PROGRAM = """
import hashlib, jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec
from ring_attn_jax import ring_attention
mesh = Mesh(np.array(jax.devices()[:1]), ("seq",))
seq = PartitionSpec(None, "seq")
ring = jax.shard_map(lambda *x: ring_attention(*x, backend="triton"), mesh=mesh, in_specs=seq, out_specs=seq)
loss = lambda *x: jnp.square(ring(*x).astype(jnp.float32)).sum()
leaves = [jax.random.normal(jax.random.key(i), (1, 640, 4, 64), jnp.bfloat16) for i in range(3)]
step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
for _ in range(3):
    result = step(*leaves)
print(hashlib.sha256(b"".join(np.asarray(x.astype(jnp.float32)).tobytes() for x in jax.tree.leaves(result))).hexdigest())
"""


def test_xla_programs_under_command_buffers_give_the_same_bits():
    """XLA's own kernels go into CUDA graphs, around ours: jaxlib does not say of its custom call that it may (0.11.2)."""
    graphs = "--xla_gpu_enable_command_buffer=FUSION,CUSTOM_CALL,CUBLAS --xla_gpu_graph_min_graph_size=1"
    hashes = set()
    for flags in ("", graphs):
        environment = {**os.environ, "XLA_FLAGS": flags, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        hashes.add(done.stdout.strip())
    assert len(hashes) == 1


def test_two_layers_in_one_xla_program_have_sums_of_their_own():
    """Both backward passes add to an array of zeros in place, and XLA knows that one array of zeros is as good as another."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, PartitionSpec

    from ring_attn_jax import ring_attention

    mesh = Mesh(np.array(jax.devices("cuda")[:1]), ("seq",))
    ring = jax.shard_map(ring_attention, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    q, k, v, dout = (jax.random.normal(jax.random.key(i), (1, 640, 4, 64), jnp.bfloat16) for i in range(4))
    both = jax.jit(lambda q, k, v, dout: jax.vjp(lambda *x: ring(ring(*x), *x[1:]), q, k, v)[1](dout))
    inner, back_inner = jax.vjp(jax.jit(ring), q, k, v)
    _, back_outer = jax.vjp(jax.jit(ring), inner, k, v)
    dinner, dk, dv = back_outer(dout)
    expected = back_inner(dinner)
    for mine, truth in zip(both(q, k, v, dout), (expected[0], expected[1] + dk, expected[2] + dv), strict=True):
        np.testing.assert_array_equal(np.asarray(mine, np.float32), np.asarray(truth, np.float32))


def test_xla_copies_no_state_between_launches():
    """Three ranks emulated in one program: their out, lse, dq, dk and dv go from launch to launch in place."""
    import jax
    import jax.numpy as jnp

    from ..support.cases import Case
    from .emulate import _jax_ring

    case = Case(ranks=3, length=1536, dtype="bfloat16", head_dim=64, v_dim=64)
    shards = case.inputs()
    arrays = [[jnp.asarray(x, case.dtype) for x in each] for each in shards[:4]]
    dlse = [jnp.asarray(x) for x in shards[4]]
    program: Any = jax.jit(lambda *a: _jax_ring(case, "triton", *a)).lower(*arrays, dlse, []).compile().as_text()
    assert "triton_kernel_call_ffi" in program
    copied = re.findall(r"= (f32\[[\d,]+\])\S* copy(?:-start)?\(", program)
    assert [shape for shape in copied if shape.count(",") >= 2] == []
