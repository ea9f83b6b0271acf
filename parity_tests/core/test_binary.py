"""Tests of reading a binary's facts, against CUDA's own tool."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ring_attn_core.kernels.binary import stack_bytes
from ring_attn_core.kernels.compile import compile_launch
from ring_attn_core.kernels.portable import launches as portable

from ..support.compilation import PLAIN, resources


@pytest.mark.parametrize("dim", [64, pytest.param(128, marks=pytest.mark.exhaustive)])
def test_bytes_of_stack_are_those_of_cuobjdump(dim):
    kernel = compile_launch(portable.dkv(replace(PLAIN, head_dim=dim, v_dim=dim), True, True), 90)
    assert stack_bytes(kernel.asm["cubin"]) == resources(kernel)[0]
    if dim == 64:
        assert stack_bytes(kernel.asm["cubin"]) > 0, "choose a kernel with some, or this shows nothing"


def test_an_invalid_binary_is_refused():
    with pytest.raises(ValueError, match="not a 64-bit ELF file"):
        stack_bytes(b"// PTX")
