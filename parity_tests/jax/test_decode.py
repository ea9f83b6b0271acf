"""A few queries over a cache spread over the ranks: exact for random problems, refused where it is differentiated."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ring_attn_jax import attend_block, full, merge_ring, tree_attention_decode
from ring_attn_jax.attend import slots as attend
from ring_attn_jax.attend.launch import compile_for

from ..support.decode import Problem, Shape
from .decode import program, run
from .ring import QUICK, SEQ, mesh_of

WHOLE = PartitionSpec()


@pytest.mark.parametrize(
    ("shape", "seed"),
    [
        (Shape(slots=1501, dtype="bfloat16", features=("window",)), 7),
        (Shape(slots=900, queries=8, heads=32, kv_heads=8), 1),
        (Shape(slots=1024, batch=2, heads=8, kv_heads=1, features=("tree_mask",), queries=3), 2),
    ],
    ids=["converted", "many rows", "whole chunks"],
)
def test_long_caches_are_exact_chunk_by_chunk(shape, seed, monkeypatch):
    monkeypatch.setattr(attend, "CHUNK", 2**12)
    monkeypatch.setattr(attend, "CONVERTED", 256)
    problem = Problem(shape, seed)
    assert (problem.arrays["q_positions"] > shape.slots / 2).all(), "a long cache"
    problem.check(*run(problem))
    program.cache_clear()


def arrays(**changed: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "q": jnp.ones((1, 2, 4, 8)),
        "k": jnp.ones((1, 6, 2, 8)),
        "v": jnp.ones((1, 6, 2, 5)),
        "q_positions": jnp.array([[3, 4]], jnp.int32),
        "k_positions": jnp.arange(6, dtype=jnp.int32)[None],
    }
    return made | changed


def decode(given: dict[str, Any], **options: Any) -> Any:
    specs = ({name: SEQ if name in ("k", "v", "k_positions") else WHOLE for name in given},)
    call = lambda given: tree_attention_decode(**given, **options)
    ring = jax.shard_map(call, mesh=mesh_of(1), in_specs=specs, out_specs=WHOLE)
    return jax.jit(ring, compiler_options=QUICK)(given)


def test_q_positions_that_are_not_an_array_are_refused():
    with pytest.raises(ValueError, match="q_positions must be an array, got None"):
        jax.shard_map(
            lambda q, k, v, at: tree_attention_decode(q, k, v, q_positions=None, k_positions=at),
            mesh=mesh_of(1),
            in_specs=(WHOLE, SEQ, SEQ, SEQ),
            out_specs=WHOLE,
        )(*(arrays()[name] for name in ("q", "k", "v", "k_positions")))
    with pytest.raises(ValueError, match=r"call tree_attention_decode inside jax\.shard_map"):
        tree_attention_decode(**arrays())


def test_differentiating_it_is_refused_in_words():
    given = arrays()
    with pytest.raises(ValueError, match=r"tree_attention_decode is for inference and has no gradient"):
        jax.grad(lambda q: decode(given | {"q": q}).sum())(given["q"])
    stopped = lambda q: decode(given | {"q": jax.lax.stop_gradient(q)}).sum()
    assert (jax.grad(stopped)(given["q"]) == 0).all()


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_batch_sharded_over_another_axis_stays_there(check_vma):
    problem = Problem(Shape(batch=2, slots=50, queries=2))
    given = {name: jnp.asarray(x[0] if name in ("k", "v", "k_positions") else x) for name, x in problem.arrays.items()}
    mesh = jax.make_mesh((2, 2), ("data", "seq"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4])
    over = lambda name: PartitionSpec("data", "seq") if name in ("k", "v", "k_positions") else PartitionSpec("data")
    call = lambda given: tree_attention_decode(**given, return_lse=True)
    specs = ({name: over(name) for name in given},)
    ring = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=PartitionSpec("data"), check_vma=check_vma)
    problem.check(*map(np.asarray, jax.jit(ring)(given)))


def test_one_program_makes_one_collective():
    problem = Problem(Shape(ranks=4, slots=20))
    given = {name: np.concatenate(list(x), 1) if name in ("k", "v", "k_positions") else x for name, x in problem.arrays.items()}
    text = program(problem.shape).lower(given).compile().as_text()
    assert len([line for line in text.splitlines() if " all-gather(" in line or " all-gather-start(" in line]) == 1
    assert "all-reduce" not in text


def test_the_kernels_are_what_a_program_for_a_gpu_launches():
    pytest.importorskip("triton")
    from jaxlib import gpu_triton

    if not hasattr(gpu_triton, "create_array_parameter"):
        pytest.skip("needs jaxlib's CUDA plugin")
    features = "tree_mask", "window", "softcap", "sinks", "alibi_slopes", "fp8"
    for ranks, merges in ((1, 1), (2, 2)):
        shape = Shape(ranks=ranks, queries=3, slots=5000, dtype="bfloat16", features=features)
        with compile_for(90):
            given = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in _abstract(shape).items()}
            text = program.__wrapped__(shape).trace(given).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("triton_kernel_call_ffi") == 1 + merges


def _abstract(shape: Shape) -> dict[str, Any]:
    from .decode import arrays as of_problem

    return of_problem(Problem(shape))


def test_a_position_beyond_int32_is_refused():
    given = arrays(q_positions=np.array([[3, 2**31]]))
    with pytest.raises(ValueError, match="q_positions holds position 2147483648: positions must be below"):
        jax.shard_map(lambda: tree_attention_decode(**given), mesh=mesh_of(1), in_specs=(), out_specs=WHOLE)()


def test_merging_over_the_ring_is_for_inference_inside_shard_map():
    q = jax.random.normal(jax.random.key(0), (2, 4, 2, 8))
    own = lambda q: merge_ring(attend_block(q, q, q, mask=full()))
    ring = jax.shard_map(own, mesh=mesh_of(1), in_specs=WHOLE, out_specs=WHOLE)
    with pytest.raises(ValueError, match="merge_ring is for inference"):
        jax.grad(lambda q: ring(q)[0].sum())(q)
    with pytest.raises(ValueError, match=r"call merge_ring inside jax\.shard_map"):
        own(q)
