"""Decoding on one GPU: exact at real sizes in both frameworks, equal in them to the bit, the same 100 times, in CUDA graphs."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ..support.decode import FEATURES, Problem, Shape, random_shape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

REAL = Shape(queries=1, heads=32, kv_heads=8, head_dim=128, v_dim=128, slots=8191, dtype="bfloat16")
ALL = tuple(name for name in FEATURES if name != "fp8")
SHAPES = [
    REAL,
    replace(REAL, dtype="float16", batch=3, queries=8, features=ALL),
    replace(REAL, batch=2, features=("fp8",)),
    replace(REAL, queries=3, features=(*ALL, "fp8")),
    replace(REAL, dtype="float16", features=("fp8", "sinks")),
    replace(REAL, dtype="float32", slots=1501, features=("softcap",)),
    replace(REAL, dtype="float32", slots=1501, queries=5, features=("fp8", "tree_mask")),
    replace(REAL, heads=32, kv_heads=32, head_dim=64, v_dim=64, batch=2),
    replace(REAL, heads=8, kv_heads=1, head_dim=256, v_dim=256, slots=3001),
    replace(REAL, heads=8, kv_heads=1, head_dim=192, v_dim=128, queries=40, slots=3001, features=("tree_mask", "window")),
    replace(REAL, queries=64, slots=3001),
    replace(REAL, head_dim=96, v_dim=33, slots=777, queries=2, features=ALL),
    replace(REAL, slots=65_537, features=("window",)),
    replace(REAL, slots=0, features=("sinks",)),
    replace(REAL, slots=1, batch=8),
    *(replace(random_shape(number), ranks=1, batch=8) for number in range(40) if random_shape(number).dtype != "float64"),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_frameworks_are_exact_and_agree_to_the_bit(shape):
    from ..jax.decode import run

    problem = Problem(shape)
    ours, theirs = on_torch(problem), run(problem)
    problem.check(*ours)
    problem.check(*theirs)
    assert all(np.array_equal(x, y) for x, y in zip(ours, theirs, strict=True))


def on_torch(problem, rank=0, **options):
    from ring_attn_torch import tree_attention_decode

    from ..torch.decode import as_numpy, tensors

    return as_numpy(tree_attention_decode(**tensors(problem, rank, "cuda"), return_lse=True, backend="triton", **options))


@pytest.mark.parametrize("shape", [REAL, SHAPES[1], SHAPES[3]], ids=str)
@pytest.mark.parametrize("ranks", [2, 5])
def test_the_pairs_of_several_ranks_are_merged_into_the_whole(shape, ranks):
    """As on so many GPUs, the collective left out."""
    from ring_attn_torch.attend import slots as attend
    from ring_attn_torch.inference import tree_attention as inference

    from ..torch.decode import as_numpy, tensors

    problem = Problem(replace(shape, ranks=ranks, slots=2001))
    pairs = []
    for rank in range(ranks):
        given = tensors(problem, rank, "cuda")
        arrays = attend.DecodeArrays(**{name: x for name, x in given.items() if name in attend.DecodeArrays._fields})
        options = (given.get(name) for name in ("window", "scale", "softcap"))
        call = inference._check(inference._problem(inference._kinds(arrays), arrays.q.device, *options, "triton"))
        pairs.append(attend.merge_by_kernel(attend.by_kernels(arrays, call), call, None))
    problem.check(*as_numpy(attend.end_by_kernel(torch.stack(pairs), arrays.sinks, call, ranks)))


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_unseen_slots_do_not_change_the_output(shape):
    problem = Problem(shape)
    mine, other = on_torch(problem), on_torch(problem.with_other_unseen())
    assert all(np.array_equal(x, y) for x, y in zip(mine, other, strict=True))


def test_the_same_bits_100_times_of_100():
    problem = Problem(SHAPES[1])
    once = on_torch(problem)
    for _ in range(99):
        assert all(np.array_equal(x, y) for x, y in zip(once, on_torch(problem), strict=True))


def test_a_cuda_graph_takes_what_its_arrays_hold_when_it_runs():
    from ring_attn_torch import tree_attention_decode

    from ..torch.decode import tensors

    problem, other = Problem(SHAPES[1], 0), Problem(SHAPES[1], 1)
    arrays, new = tensors(problem, 0, "cuda"), tensors(other, 0, "cuda")
    tree_attention_decode(**arrays)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tree_attention_decode(**arrays)
    for name, x in new.items():
        if isinstance(x, torch.Tensor):
            arrays[name].copy_(x)
    graph.replay()
    assert torch.equal(out, tree_attention_decode(**new))


def test_a_million_slots_are_exact():
    """Against float64 of one kv head at a time."""
    from ring_attn_torch import tree_attention_decode

    generator = torch.Generator("cuda").manual_seed(0)
    make = lambda *shape: torch.randn(*shape, device="cuda", generator=generator, dtype=torch.bfloat16)
    slots = 2**20
    q, k, v = make(1, 1, 8, 128), make(1, slots, 2, 128), make(1, slots, 2, 128)
    k_positions = torch.randperm(slots, device="cuda", generator=generator, dtype=torch.int32)[None]
    q_positions = torch.tensor([[slots - 1000]], device="cuda", dtype=torch.int32)
    out, lse = tree_attention_decode(q, k, v, q_positions=q_positions, k_positions=k_positions, return_lse=True)
    for head in range(8):
        s = (k[0, :, head // 4].double() @ q[0, 0, head].double()) * 128**-0.5
        s = s.masked_fill(k_positions[0] > q_positions[0, 0], -torch.inf)
        exact = s.softmax(0) @ v[0, :, head // 4].double()
        assert (out[0, 0, head] - exact).norm() <= 6e-3 * exact.norm()
        assert (lse[0, 0, head] - s.logsumexp(0)).abs() <= 1e-5 * s.logsumexp(0)
