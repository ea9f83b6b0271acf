"""Tests of the arguments that a start of a kernel packs for the driver: no GPU needed. GPU tests show that they are right."""

from __future__ import annotations

import sys
import time

import pytest

from ring_attn_core.kernels import compile, steps
from ring_attn_core.kernels.bound_launch import layout, parameters
from ring_attn_core.kernels.compile import compile_launch
from ring_attn_core.kernels.hopper import launches as hopper
from ring_attn_core.kernels.portable import launches as portable

from ..support.compilation import PLAIN
from ..support.selection import first
from .hopper_launches import HOPPER

PTX = """.visible .entry kernel(
	.param .align 64 .b8 kernel_param_0[128],
	.param .u32 kernel_param_1,
	.param .u64 kernel_param_2,
	.param .f32 kernel_param_3,
	.param .u64 .ptr .global .align 1 kernel_param_4,
	.param .u64 .ptr .global .align 1 kernel_param_5
)
.reqntid 128
"""


def test_every_parameter_lies_where_ptx_has_it():
    packed, offsets = layout(PTX, [True, False, False, False])
    assert offsets == [0, 128, 136, 144, 152, 160]
    assert packed.size == 168
    content = packed.pack(bytes(range(128)), 7, 2**40 + 1, 0.5)
    assert content[:128] == bytes(range(128))
    assert content[128:136] == (7).to_bytes(4, "little") + bytes(4)
    assert content[136:144] == (2**40 + 1).to_bytes(8, "little")
    assert content[144:148] == b"\0\0\0\x3f"
    assert not any(content[148:])


@pytest.mark.parametrize("expected", [[True, False], [False] * 4, [True] + [False] * 6], ids=["more", "no descriptor", "fewer"])
def test_other_parameters_than_expected_are_refused(expected):
    with pytest.raises(RuntimeError, match=f"its 6 parameters are not the {len(expected)} of the launch"):
        layout(PTX, expected)


LAUNCHES = {
    "hopper's forward": steps.forward(HOPPER, True, True),
    "hopper's backward": hopper.backward(HOPPER, True),
    "the portable forward": steps.forward(PLAIN, True, True),
    "the portable backward": portable.dkv(PLAIN, False, False),
    "hopper's backward in the middle of a ring": hopper.backward(HOPPER, False),
}


@pytest.mark.parametrize("launch", first(LAUNCHES.values(), 4), ids=LAUNCHES)
def test_a_launch_fits_its_compiled_kernel(launch):
    kernel = compile_launch(launch, 90)
    given = parameters(launch, kernel)
    packed, offsets = layout(kernel.asm["ptx"], [isinstance(value, bytes) for value in given.values])
    assert len(packed.pack(*given.values)) == packed.size
    assert len(offsets) == len(given.values) + 2, "and two of scratch memory, which none of ours has"
    assert not kernel.metadata.global_scratch_size and not kernel.metadata.profile_scratch_size
    named = {name for _, name in given.arrays} | {name for _, name, _ in given.descriptors}
    assert named == {*launch.inputs, *(x.name for x in launch.written)}


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_is_told_of_a_long_wait_in_one_line_that_goes_again(monkeypatch, capsys, terminal):
    monkeypatch.setattr(compile, "PATIENCE", 0.2)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    for count, said in ((3, "Triton compiles 3 kernels, once for this machine ...\r\033[K" if terminal else ""), (0, "")):
        with compile._slow_notice(count):
            time.sleep(0.6)
        with compile._slow_notice(count):
            pass
        assert capsys.readouterr().err == said, "a process that waits for another one is silent"
