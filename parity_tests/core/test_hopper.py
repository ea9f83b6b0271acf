"""The Hopper kernels: what they take, and what the compiler makes of them."""

from __future__ import annotations

import importlib
import pkgutil
import re
from dataclasses import replace
from typing import Any

import pytest

from ring_attn_core import kernels
from ring_attn_core.kernels import steps
from ring_attn_core.kernels.binary import stack_bytes
from ring_attn_core.kernels.compile import compile_launch, triton_release
from ring_attn_core.kernels.hopper import launches as hopper
from ring_attn_core.kernels.hopper.supports import refusal
from ring_attn_core.kernels.launch import Descriptor, Scalar
from ring_attn_core.kernels.obstacles import MAX_STACK
from ring_attn_core.kernels.portable import launches as portable
from ring_attn_core.kernels.ptx import as_before
from ring_attn_core.kernels.tile_sizes import shared_memory

from ..support.compilation import PLAIN, advice, compiled_with_advice, released_in_flight, resources, sass, step
from ..support.selection import first
from .hopper_launches import HOPPER, MEASURED, launches


def test_every_module_of_kernels_is_imported_without_a_gpu():
    for module in pkgutil.walk_packages(kernels.__path__, kernels.__name__ + "."):
        importlib.import_module(module.name)


def test_the_hopper_forward_takes_the_place_of_the_portable_one():
    assert steps.forward(HOPPER, True, True).kernel == "hopper_forward"
    assert steps.forward(PLAIN, True, True).kernel == "forward"
    for place in ((True, True), (True, False), (False, False), (False, True)):
        ours, portable = steps.forward(HOPPER, *place), steps.forward(PLAIN, *place)
        made = [x.over for x in ours.scratch]
        assert [x for x in ours.inputs if x not in made] == list(portable.inputs), "whoever launches it passes the same arrays"
        assert ours.outputs == portable.outputs


def test_programs_of_the_hopper_forward_take_tiles_until_none_is_left():
    launch = steps.forward(HOPPER, True, True)
    assert (launch.grid, dict(launch.arguments)["total"]) == (hopper.PROGRAMS, Scalar(16 * 128, "i32"))
    assert steps.forward(replace(HOPPER, seq_local=256, heads=1, kv_heads=1), True, True).grid == 2
    assert [(x.shape, x.over) for x in launch.scratch] == [((1,), "tickets_in")]


@pytest.mark.parametrize(("tokens", "heads"), [(4096, 8), (16384, 8), (32768, 4), (131072, 1), (2**20, 1)])
def test_longer_walks_of_the_hopper_backward_share_their_queries_among_fewer_heads(tokens, heads):
    launch = hopper.backward(replace(HOPPER, seq_local=tokens, kv_local=tokens), True)
    assert dict(launch.arguments)["together"] == Scalar(heads, "i32")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "float32"),
        ({"head_dim": 100}, "that 8 divides"),
        ({"v_dim": 264}, "v_dim is 264"),
        ({"head_dim": 64}, "wider than keys"),
        ({"capability": 100}, "sm_100"),
        ({"tma": False}, "TMA"),
        ({"kv_local": 0}, "empty"),
    ],
    ids=str,
)
def test_the_portable_forward_takes_the_calls_that_hopper_refuses(change, reason):
    call = replace(HOPPER, **change)
    assert reason in str(refusal(call))
    assert steps.forward(call, True, True).kernel == "forward"


def test_keys_beside_their_values_end_where_the_values_begin():
    """TMA reads 0 beyond a descriptor's columns: with the values in place of zeros, NaN in them would reach every score."""
    call = replace(HOPPER, packed=True, head_dim=96, v_dim=96)
    arguments = dict(steps.forward(call, True, True).arguments)
    k, v = arguments["k_BTGD"], arguments["v_BTGE"]
    assert isinstance(k, Descriptor) and isinstance(v, Descriptor)
    assert (k.shape[-1], k.block[-1], k.strides) == (96, 128, (16384 * 16 * 192, 16 * 192, 192, 1))
    assert (v.shape[-1], v.strides) == (192, k.strides)


SHORT_OF_REGISTERS = "backward 64", ("softcap", "everything")
"""The kernels whose products wait for each other with Triton 3.9, because ptxas lacks registers: right, but not yet timed."""

STACK_BY_CHANCE, RELOADS_BY_CHANCE = 8, 1
"""ptxas orders instructions by the table of source lines too: one PTX with other line numbers (3.6, dropout) had 4 for 3."""

QUICK = ("forward 128, 1 runs", "backward 128, 1 runs")
OFTEN = ("forward 128, middle step", "backward 128, keys travel", "forward 64, everything", "backward 64, everything")


def compiled_in(name: str) -> Any:
    """Return a launch's name as a test's parameter, with the mark of the run that compiles it.

    ``make test`` has one launch of each kernel without features. Test-all adds a step in the middle of a ring, and heads of 64
    with all features at once on two runs. ``--full`` has each feature alone: run it after a change of a kernel or of Triton.
    """
    marks = pytest.mark.exhaustive if name in OFTEN else pytest.mark.full
    return pytest.param(name, marks=() if name in QUICK else marks)


@pytest.mark.parametrize("name", [compiled_in(name) for name in MEASURED])
def test_no_launch_loses_more_registers_than_were_measured(name):
    """The oldest and the newest Triton have a bound each; one between them keeps to what "auto" takes.

    Besides, products stay asynchronous, registers are moved from the producers, and nothing is released before it was read.
    """
    launch = launches()[name]
    kernel = compiled_with_advice(launch)
    stack, (_, reloads, products) = stack_bytes(kernel.asm["cubin"]), resources(kernel)
    assert stack <= MAX_STACK[launch.kernel], '"auto" passes over it'
    release = ".".join(map(str, triton_release()))
    if release in MEASURED[name]:
        most_stack, most_reloads = MEASURED[name][release]
        assert stack <= most_stack + STACK_BY_CHANCE, "more bytes of stack"
        assert reloads <= most_reloads + RELOADS_BY_CHANCE, "more reloads in a step without a mask"
    assert products > 0, "no wgmma in the binary"
    assert kernel.metadata.shared <= shared_memory(90)
    assert kernel.asm["ptx"].count("setmaxnreg") >= 3, "registers are moved from the producer to the consumers"
    assert ("cp.reduce.async.bulk.tensor" in kernel.asm["ptx"]) == (launch.kernel == "hopper_backward"), "TMA adds dq"
    short = triton_release() >= (3, 9) and SHORT_OF_REGISTERS[0] in name and any(x in name for x in SHORT_OF_REGISTERS[1])
    assert short or not re.search(r"C75\d\d", advice(kernel)), "ptxas gave up on asynchronous products"
    assert released_in_flight(kernel) == []


@pytest.mark.parametrize("name", first(["forward 128, 1 runs", "backward 128, 1 runs", "forward 64, 1 runs"], 2, most=2))
def test_warps_meet_as_often_with_every_triton(name):
    """Count meetings in a step without a mask. If let, all warps meet at each wait for a product (3.9) or for keys (3.7)."""
    met = sum("BAR.SYNC" in x for x in step(compile_launch(launches()[name], 90)))
    assert met == (1 if name.startswith("forward") else 3)


def test_changes_of_newer_tritons_are_undone_in_every_product():
    """By the descriptors of ptx.py: all of them sums of 64 bits, and no factor copied before its product."""
    for name in ("forward 128, 1 runs", "backward 128, 1 runs"):
        ptx = compile_launch(launches()[name], 90).asm["ptx"]
        assert as_before(ptx) == ptx


@pytest.mark.exhaustive
@pytest.mark.parametrize("runs", [1, pytest.param(2, marks=pytest.mark.full)])
def test_the_hopper_forward_reads_and_writes_its_state_at_constant_distances(runs):
    """With an address for every element the loads wait for registers: the state then cost 7 % of a causal launch, not 3."""
    kernel = compiled_with_advice(steps.forward(replace(HOPPER, q_runs=runs, k_runs=runs), False, False))
    at = re.findall(r"(?:LDG|STG)\.E\.64 .*?\[R\d+\.64(\+-?0x\w+)?\]", sass(kernel))
    assert len(at) >= 64
    assert sum(not distance for distance in at) <= len(at) / 8
    assert resources(kernel)[1] == 0, "reloads in a loop without a mask"
    assert not re.search(r"C75\d\d", advice(kernel)), "ptxas gave up on asynchronous products"
    assert released_in_flight(kernel) == []


def test_the_hopper_backward_makes_all_gradients_in_one_pass():
    launch = hopper.backward(HOPPER, True)
    assert [x.name for x in launch.outputs] == ["dq", "dk", "dv"]
    of_ring = hopper.backward(replace(HOPPER, packed=True), False).outputs
    assert [(x.name, x.over) for x in of_ring] == [("dq", "dq_in"), ("dkv", None)]
    assert {x.kernel for x in (*steps.of_forward(HOPPER, 3), *steps.of_backward(HOPPER, 3))} == {
        "delta",
        "hopper_forward",
        "hopper_backward",
        "hopper_dq",
    }


TWO_PASSES = [{"head_dim": 256, "v_dim": 256}, {"v_dim": 64}, {"head_dim": 192}, {"heads": 32, "kv_heads": 8, "kv_local": 4096}]


@pytest.mark.parametrize("change", TWO_PASSES, ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_two_passes_take_the_arrays_of_the_portable_kernels(change, packed):
    call = replace(HOPPER, **change, packed=packed)
    assert {x.kernel for x in steps.of_backward(call, 3)} == {"delta", "hopper_wide_dq", "hopper_wide_dkv"}
    for place in ((True, True), (True, False), (False, False), (False, True)):
        for make, of_portable in ((steps.dq, portable.dq), (steps.dkv, portable.dkv)):
            ours, theirs = make(call, *place), of_portable(call, *place)
            made = [x.over for x in ours.scratch]
            assert list(dict.fromkeys(x for x in ours.inputs if x not in made)) == list(dict.fromkeys(theirs.inputs))
            assert ours.outputs == theirs.outputs


@pytest.mark.parametrize(
    "change", [{}, {"heads": 32, "kv_heads": 8}, {"head_dim": 64, "v_dim": 64, "kv_heads": 4, "kv_local": 1024}]
)
def test_one_pass_takes_long_rows_and_heads_of_64(change):
    assert steps.in_one_pass(replace(HOPPER, **change))


def test_the_portable_kernels_take_the_calls_that_hopper_refuses_backward_too():
    assert {"dq", "dkv"} <= {x.kernel for x in steps.of_backward(replace(HOPPER, capability=80), 1)}


def test_extents_are_sorted_into_lists_of_tiles_before_the_launches_that_read_them():
    call = replace(HOPPER, array_names=frozenset({"extents"}), zero_masked=True, fully_masked=True)
    assert [x.kernel for x in steps.lists(call, "forward")] == ["key_tiles", "tile_order", "not_finite"]
    assert [x.kernel for x in steps.lists(call, "backward")] == ["key_ranges", "query_tiles"]
    wide = replace(call, head_dim=256, v_dim=256)
    names = [x.kernel for x in steps.of_backward(wide, 1)]
    assert names.index("key_tiles") < names.index("hopper_wide_dq") and names.index("query_tiles") < names.index(
        "hopper_wide_dkv"
    )
    assert steps.lists(replace(call, hopper=False), "forward") == steps.lists(HOPPER, "forward") == ()


def test_key_extents_become_intervals_of_tiles_in_every_pass():
    call = replace(HOPPER, array_names=frozenset({"key_extents"}), zero_masked=True, fully_masked=True)
    assert [x.kernel for x in steps.lists(call, "forward")] == ["extent_bounds", "intervals", "tile_order", "not_finite"]
    assert [x.kernel for x in steps.lists(call, "backward")] == ["extent_bounds", "intervals", "query_tiles"]
    for kernel in ("forward", "backward", "dq", "dkv"):
        names = [name for x in steps.lists(call, kernel) for name in x.output_names]
        assert len(names) == len(set(names)) and "intervals" in names
    wide = replace(call, head_dim=256, v_dim=256)
    for launch in (steps.forward(call, True, True), hopper.backward(call, True), steps.dq(wide, True, True)):
        assert {"intervals", "key_extents"} <= set(launch.inputs)
