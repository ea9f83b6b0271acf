"""The Hopper kernels: what they take, and what the compiler makes of them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from parity_tests.compilation import EVERYTHING, PLAIN, advice, released_in_flight, resources, sass
from ring_attn_core.kernels import hopper, steps
from ring_attn_core.kernels.compile import compiled
from ring_attn_core.kernels.launch import Descriptor, Launch, Scalar
from ring_attn_core.kernels.tiles import shared_memory

HOPPER = replace(PLAIN, hopper=True)


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
    launch = hopper.backward(replace(HOPPER, seq_local=tokens, kv_local=tokens), True, True)
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
def test_what_the_hopper_forward_refuses_the_portable_one_takes(change, reason):
    call = replace(HOPPER, **change)
    assert reason in str(hopper.refusal(call))
    assert steps.forward(call, True, True).kernel == "forward"


def test_keys_beside_their_values_end_where_the_values_begin():
    """TMA reads 0 beyond a descriptor's columns: with the values in place of zeros, NaN in them would reach every score."""
    call = replace(HOPPER, packed=True, head_dim=96, v_dim=96)
    arguments = dict(steps.forward(call, True, True).arguments)
    k, v = arguments["k_BTGD"], arguments["v_BTGE"]
    assert isinstance(k, Descriptor) and isinstance(v, Descriptor)
    assert (k.shape[-1], k.block[-1], k.strides) == (96, 128, (16384 * 16 * 192, 16 * 192, 192, 1))
    assert (v.shape[-1], v.strides) == (192, k.strides)


@pytest.mark.parametrize("dim", [64, 128])
def test_the_hopper_forward_hardly_spills_and_waits_for_no_product(dim):
    """Newer Tritons use an assembler that spills where tiles are masked; "auto" leaves the kernel out there."""
    kernel = compiled(steps.forward(replace(HOPPER, head_dim=dim, v_dim=dim), True, True), 90)
    used, reloaded, products = resources(kernel)
    stack, reloads = SPILLS[dim] if triton_release() > (3, 7) else (8, 0)
    assert used <= stack
    assert reloaded <= reloads, "in the loop without a mask, of some 500 instructions"
    assert products > 0, "no wgmma in the binary"
    assert kernel.asm["ptx"].count("setmaxnreg") >= 3, "registers are moved from the producer to the consumers"
    assert not re.search(r"C75\d\d", advice(kernel)), "ptxas gave up on asynchronous products"
    assert released_in_flight(kernel) == []


@pytest.mark.parametrize(("first", "last", "runs"), [(False, False, 1), (False, False, 2), (False, True, 1), (True, False, 1)])
def test_the_hopper_forward_reads_and_writes_its_state_at_constant_distances(first, last, runs):
    """With an address for every element the loads wait for registers: the state then cost 7 % of a causal launch, not 3."""
    kernel = compiled(steps.forward(replace(HOPPER, q_runs=runs, k_runs=runs), first, last), 90)
    at = re.findall(r"(?:LDG|STG)\.E\.64 .*?\[R\d+\.64(\+-?0x\w+)?\]", sass(kernel))
    assert len(at) >= 64
    assert sum(not distance for distance in at) <= len(at) / 8
    assert resources(kernel)[1] == 0, "reloads in a loop without a mask"
    assert not re.search(r"C75\d\d", advice(kernel)), "ptxas gave up on asynchronous products"
    assert released_in_flight(kernel) == []


SPILLS = {64: (8, 0), 128: (32, 0)}
"""Bytes of stack and reloads by the assembler of Triton 3.9."""


@pytest.mark.parametrize("feature", [*sorted(EVERYTHING), "softcap"])
def test_the_hopper_forward_compiles_with_each_feature(feature):
    check_compiled(steps.forward(replace(HOPPER, dropout_rate=0.1, **with_feature(feature)), True, False))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("dim", "last"), [(64, True), (128, False), (128, True), (256, False)])
def test_the_hopper_forward_compiles_with_every_feature_at_once(dim, last):
    call = replace(HOPPER, head_dim=dim, v_dim=dim, clean=True, q_runs=2, k_runs=2)
    check_compiled(steps.forward(replace(call, given=EVERYTHING, dropout_rate=0.1, softcap=30.0), not last, last))


def test_the_hopper_backward_makes_all_gradients_in_one_pass():
    launch = hopper.backward(HOPPER, True, True)
    assert [x.name for x in launch.outputs] == ["dq", "dk", "dv"]
    assert [(x.name, x.over) for x in hopper.backward(replace(HOPPER, packed=True), False, False).outputs] == [
        ("dq", "dq_in"),
        ("dkv", "dkv_in"),
    ]
    assert {x.kernel for x in (*steps.of_forward(HOPPER, 3), *steps.of_backward(HOPPER, 3))} == {
        "delta",
        "hopper_forward",
        "hopper_backward",
        "hopper_dq",
    }


REFUSED = [
    ({"head_dim": 256, "v_dim": 256}, "256"),
    ({"v_dim": 64}, "v_dim 64"),
    ({"capability": 80}, "sm_80"),
]


@pytest.mark.parametrize(("change", "reason"), REFUSED, ids=str)
def test_what_the_hopper_backward_refuses_the_portable_kernels_take(change, reason):
    call = replace(HOPPER, **change)
    assert reason in str(hopper.refusal_of_backward(call))
    assert {"dq", "dkv"} <= {x.kernel for x in steps.of_backward(call, 1)}


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_the_hopper_backward_hardly_spills_and_waits_for_no_product(dim):
    """Reloads in the loop without a mask, of some 390 instructions; newer Tritons as with the forward."""
    kernel = compiled(hopper.backward(replace(HOPPER, head_dim=dim, v_dim=dim), True, True), 90)
    used, reloaded, products = resources(kernel)
    stack, reloads = (304, 53) if triton_release() > (3, 7) else (104, 6)
    assert used <= stack
    assert reloaded <= reloads
    assert products > 0, "no wgmma in the binary"
    assert kernel.metadata.shared <= shared_memory(90)
    assert kernel.asm["ptx"].count("setmaxnreg") >= 3, "registers are moved from the producer to the consumers"
    assert "cp.reduce.async.bulk.tensor" in kernel.asm["ptx"], "TMA adds dq"
    assert not re.search(r"C75\d\d", advice(kernel)), "ptxas gave up on asynchronous products"
    assert released_in_flight(kernel) == []


@pytest.mark.parametrize("place", [(True, False), (False, False)])
@pytest.mark.parametrize("packed", [False, True])
def test_the_hopper_backward_compiles_in_every_step_of_a_ring(packed, place):
    call = replace(HOPPER, packed=packed, clean=True, q_runs=2, k_runs=2, given=frozenset({"ceiling"}), dtype="float16")
    check_compiled(hopper.backward(call, *place))
    compiled(hopper.dq(call), 90)


@pytest.mark.parametrize("feature", [*sorted(EVERYTHING - {"sinks"}), "softcap"])
def test_the_hopper_backward_compiles_with_each_feature(feature):
    check_compiled(hopper.backward(replace(HOPPER, dropout_rate=0.1, **with_feature(feature)), True, True))


@pytest.mark.parametrize("dim", [64, 128])
def test_the_hopper_backward_compiles_with_every_feature_at_once(dim):
    call = replace(HOPPER, head_dim=dim, v_dim=dim, clean=True, q_runs=2, k_runs=2, aligned=False)
    check_compiled(hopper.backward(replace(call, given=EVERYTHING, dropout_rate=0.1, softcap=30.0), False, False))


def with_feature(feature: str) -> dict[str, Any]:
    """As a call has it: under extents there may be keys that nobody sees."""
    return {"softcap": 30.0} if feature == "softcap" else {"given": frozenset({feature}), "clean": feature == "extents"}


def check_compiled(launch: Launch) -> None:
    """It is Hopper's, it fits, ptxas kept its products asynchronous, and nothing is released before it was read."""
    assert launch.kernel.startswith("hopper")
    kernel = compiled(launch, 90)
    assert kernel.metadata.shared <= shared_memory(90)
    assert not re.search(r"C75\d\d", advice(kernel))
    assert released_in_flight(kernel) == []
