"""A kernel that makes nothing but the tanh of Hopper's kernels, to see how exact it is."""

# pyright: reportArgumentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ring_attn_core.kernels.hopper.instructions import special_tanh


@gluon.jit
def tanh_of(x_ptr, y_ptr):
    """Store the tanh of 1,024 numbers in each program."""
    at = gl.program_id(0) * 1024 + gl.arange(0, 1024, gl.BlockedLayout([8], [32], [4], [0]))
    gl.store(y_ptr + at, special_tanh(gl.load(x_ptr + at)))
