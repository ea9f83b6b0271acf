"""Decoding without a framework: the truth against its definition, the splits of a cache, the kernels' launches and binaries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ring_attn_core.kernels.decode_call import DecodeCall, count_splits
from ring_attn_core.kernels.launch import Scalar
from ring_attn_core.kernels.tile_sizes import shared_memory
from ring_attn_core.problem.checks import OptionalArray
from ring_attn_core.problem.decode import Decode, check_nodes
from ring_attn_core.reference import decode

from ..support.decode import FEATURES, Problem, Shape
from ..support.selection import first

EVERYTHING = Shape(batch=2, queries=4, slots=19, features=FEATURES)


def test_the_truth_is_its_definition_slot_by_slot():
    problem = Problem(EVERYTHING)
    (q, k, v, q_positions, k_positions), f = problem._whole
    out, lse = decode.exact(q, k, v, q_positions, k_positions, **f)
    for b, i, h in np.ndindex(*q.shape[:3]):
        group = h // 2
        depth = f["tree_mask"][b].sum(-1) - 1
        scores, values = [float(f["sinks"][h])], [np.zeros(v.shape[-1])]
        for j, position in enumerate(k_positions[b]):
            node = position - q_positions[b, 0]
            if position < 0 or node >= 4 or (node >= 0 and not f["tree_mask"][b, i, node]):
                continue
            at = q_positions[b, 0] + depth[node] if node >= 0 else position
            lag = q_positions[b, 0] + depth[i] - at
            if lag > f["window"]:
                continue
            s = f["scale"] * float(q[b, i, h].astype(float) @ k[b, j, group].astype(float)) * float(f["k_scale"][group])
            scores.append(f["softcap"] * np.tanh(s / f["softcap"]) - float(f["alibi_slopes"][h]) * lag)
            values.append(v[b, j, group].astype(float) * float(f["v_scale"][group]))
        weights = np.exp(scores)
        assert np.isclose(lse[b, i, h], np.log(weights.sum()), atol=1e-12)
        assert np.allclose(out[b, i, h], (weights[:, None] * np.array(values)).sum(0) / weights.sum(), atol=1e-12)


@pytest.mark.parametrize("programs", [1, 8, 32, 100, 200, 300, 1000])
@pytest.mark.parametrize("tiles", [0, 1, 3, 16, 257, 16384])
def test_splits_fill_a_gpu_and_are_never_shorter_than_the_least(programs, tiles):
    at_once, least = 396, 4
    splits = count_splits(programs, tiles, at_once, least)
    assert 1 <= splits <= max(1, tiles // least)
    time = lambda splits: -(-programs * splits // at_once) * -(-tiles // splits)
    assert time(splits) <= time(1)
    if tiles == 16384 and programs <= at_once:
        assert time(splits) <= 1.35 * tiles * programs / at_once, "the GPU is full"


PLAIN = DecodeCall(
    batch=1,
    queries=1,
    slots=2**20,
    heads=32,
    kv_heads=8,
    head_dim=128,
    v_dim=128,
    dtype="bfloat16",
    fp8=False,
    scale=128**-0.5,
    softcap=None,
    window=None,
    array_names=frozenset({"q_positions", "k_positions"}),
    capability=90,
    multiprocessors=132,
)
EVERY_FEATURE = replace(
    PLAIN,
    queries=8,
    softcap=30.0,
    window=4096,
    fp8=True,
    array_names=PLAIN.array_names | {"tree_mask", "sinks", "alibi_slopes", "k_scale", "v_scale"},
)


@pytest.mark.parametrize("call", [PLAIN, EVERY_FEATURE], ids=["plain", "everything"])
def test_arguments_are_the_kernels_parameters_in_their_order(call):
    pytest.importorskip("triton")
    from ring_attn_core.kernels.compile import kernel_function
    from ring_attn_core.kernels.portable.launches import of_decode

    for launch in of_decode(call):
        names = kernel_function(launch.kernel).arg_names
        assert [name for name, _ in launch.arguments] == [name for name in names if name in dict(launch.arguments)]
        buffers = [x.name for _, x in launch.arguments if not isinstance(x, Scalar)]
        assert buffers == [*launch.inputs, *(output.name for output in launch.written)]
        assert {*names} >= {name for name, _ in launch.constants}


@pytest.mark.parametrize(
    ("call", "capability"),
    first([(PLAIN, 80), (PLAIN, 90), (EVERY_FEATURE, 90), (PLAIN, 100), (EVERY_FEATURE, 80)], 2, most=3),
    ids=["sm_80", "sm_90", "everything, sm_90", "sm_100", "everything, sm_80"],
)
def test_the_kernels_compile_and_fit_into_shared_memory(call, capability):
    pytest.importorskip("triton")
    from ring_attn_core.kernels.compile import compile_launch
    from ring_attn_core.kernels.portable.launches import decode as launch

    kernel = compile_launch(launch(replace(call, capability=capability)), capability)
    assert kernel.metadata.shared <= shared_memory(capability)
    assert kernel.asm["ptx"].count("cp.async.cg") >= 8, "k and v are read ahead"


def test_slots_are_not_part_of_a_compiled_kernel():
    pytest.importorskip("triton")
    from ring_attn_core.kernels.compile import compile_launch
    from ring_attn_core.kernels.portable.launches import decode as launch

    assert compile_launch(launch(PLAIN), 90) is compile_launch(launch(replace(PLAIN, slots=2**14, batch=16)), 90)


def problem(slots: int = 6, **changed: Any) -> Decode:
    arrays = OptionalArray("q_positions", (1, 2), "int32"), OptionalArray("k_positions", (1, slots), "int32")
    array_names: dict[str, Any] = {
        "q_shape": (1, 2, 4, 8),
        "k_shape": (1, slots, 2, 8),
        "v_shape": (1, slots, 2, 8),
        "arrays": arrays,
    }
    made: dict[str, Any] = {**array_names, "dtypes": ("float32",) * 3, **changed}
    return Decode(**made)


def test_ranks_agree_on_everything_but_how_many_slots_each_has():
    assert problem(6).alike() == problem(9).alike()
    differing: list[dict[str, Any]] = [{"window": 3}, {"scale": 1.0}, {"backend": "blockwise"}, {"v_shape": (1, 6, 2, 4)}]
    for changed in differing:
        assert problem(**changed).alike() != problem().alike()


def test_the_nodes_of_a_tree_are_counted_on_from_the_first():
    check_nodes([[3, 4, 5], [0, 1, 2], []])
    for wrong in ([3, 5, 6], [4, 3, 2], [-1, 0, 1]):
        with pytest.raises(ValueError, match="number the nodes in the order of their slots"):
            check_nodes([[0, 1, 2], wrong])
