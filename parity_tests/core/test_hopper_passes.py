"""Tests of the compiled Hopper kernels of wide heads, of key extents and of the steps of a ring."""

from __future__ import annotations

import re
from dataclasses import replace
from traceback import format_exception

import pytest
from triton.compiler.errors import CompilationError

from ring_attn_core.kernels import steps
from ring_attn_core.kernels.binary import stack_bytes
from ring_attn_core.kernels.compile import compile_launch
from ring_attn_core.kernels.hopper import launches as hopper
from ring_attn_core.kernels.launch import Launch
from ring_attn_core.kernels.obstacles import MAX_STACK
from ring_attn_core.kernels.tile_sizes import shared_memory

from ..support.compilation import advice, compiled_with_advice, released_in_flight
from .hopper_launches import HOPPER

WIDTHS = {
    (256, 256): {"packed": True},
    (192, 128): {},
    (128, 64): {"q_runs": 2, "k_runs": 2, "array_names": frozenset({"key_mask", "alibi_slopes"}), "softcap": 30.0},
    (136, 136): {"array_names": frozenset({"extents"}), "zero_masked": True, "fully_masked": True},
}
"""Heads whose backward takes two passes, with features of the call."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("widths", [pytest.param(x, marks=[pytest.mark.full] if x[0] in (136, 192) else []) for x in WIDTHS])
def test_a_backward_in_two_passes_compiles(widths):
    call = replace(HOPPER, head_dim=widths[0], v_dim=widths[1], **WIDTHS[widths])
    place = (False, False) if widths == (256, 256) else (True, True)
    for launch in (steps.dq(call, *place), steps.dkv(call, *place)):
        check_compiled(launch)
        assert stack_bytes(compile_launch(launch, 90).asm["cubin"]) <= MAX_STACK[launch.kernel]
        for each in (*steps.lists(call, "dq"), *steps.lists(call, "dkv")):
            compile_launch(each, 90)


@pytest.mark.exhaustive
@pytest.mark.parametrize("widths", [(256, 256), pytest.param((192, 128), marks=pytest.mark.full)])
def test_a_forward_of_wide_heads_compiles(widths):
    check_compiled(steps.forward(replace(HOPPER, head_dim=widths[0], v_dim=widths[1]), False, False))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("dim", "others"), [(64, set()), *(pytest.param(dim, {"extents"}, marks=pytest.mark.full) for dim in (128, 256))]
)
def test_with_key_extents_every_pass_compiles_within_the_stack_that_auto_takes(dim, others):
    array_names = frozenset({"key_extents", *others})
    call = replace(
        HOPPER, array_names=array_names, zero_masked=True, fully_masked=True, head_dim=dim, v_dim=dim, q_runs=2, k_runs=2
    )
    passes = [steps.dq, steps.dkv] if dim > 128 else [lambda call, *_: hopper.backward(call, True)]
    for launch in (one(call, True, True) for one in (steps.forward, *passes)):
        assert stack_bytes(compile_launch(launch, 90).asm["cubin"]) <= MAX_STACK[launch.kernel]


@pytest.mark.exhaustive
@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.full), True])
def test_the_hopper_backward_compiles_in_a_ring(packed):
    call = replace(
        HOPPER,
        packed=packed,
        zero_masked=True,
        fully_masked=True,
        q_runs=2,
        k_runs=2,
        array_names=frozenset({"key_mask"}),
        dtype="float16",
    )
    check_compiled(hopper.backward(call, False))
    compile_launch(hopper.dq(call), 90)


def check_compiled(launch: Launch) -> None:
    """It is Hopper's, it fits, ptxas kept its products asynchronous, and nothing is released before it was read."""
    assert launch.kernel.startswith("hopper")
    kernel = compiled_with_advice(launch)
    assert kernel.metadata.shared <= shared_memory(90)
    assert not re.search(r"C75\d\d", advice(kernel))
    assert released_in_flight(kernel) == []


def test_gradients_of_16_bits_that_add_earlier_ones_do_not_compile():
    """No call makes such a launch: keys whose gradients are complete do not travel, and have one step."""
    with pytest.raises(CompilationError) as caught:
        compile_launch(steps.dkv(replace(HOPPER, head_dim=256, v_dim=256), False, True), 90)
    assert "gradients of 16 bits are complete" in "".join(format_exception(caught.value))
