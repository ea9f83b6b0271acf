"""How warps wait for each other: mbarriers, named barriers, and numbers handed over in shared memory."""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .gluon import constexpr_function

FIRST_BARRIER = gl.constexpr(6)
"""Named barriers have ids 0 to 15, of which Triton takes 0, 1 and one for each partition."""


PLACE_READ = gl.constexpr(4)
Q_FREE = gl.constexpr(5)
VALUES_CLEAN = gl.constexpr(8)
"""Barriers of the forward behind those of its two stages of keys and of values; from Q_FREE on there is one for each consumer."""


@constexpr_function
def barrier_text(operation, threads):
    return f"bar.{operation} $1, {threads}; mov.u32 $0, $1;"


@gluon.jit
def barrier(text: gl.constexpr, stage, WARPS: gl.constexpr):
    """PTX that every thread of the calling partition runs once, with the barrier of a stage in $1."""
    x = gl.full([WARPS * 32], FIRST_BARRIER + stage, gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0]))
    gl.inline_asm_elementwise(text, "=r,r,~{memory}", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def release(stage, GROUPS: gl.constexpr, WARPS: gl.constexpr = 4):
    """This partition, one warpgroup of GROUPS or all of them, has read a stage for the last time.

    To be called behind what uses the last loads of it: bar.arrive does not wait for loads in flight, and TMA, or another warp,
    would overwrite what they read.
    """
    barrier(barrier_text("arrive", GROUPS * 128 + 32), stage, WARPS)


@gluon.jit
def acquire(stage, GROUPS: gl.constexpr):
    """The producer waits until every consumer has released a stage."""
    barrier(barrier_text("sync", GROUPS * 128 + 32), stage, 1)


@gluon.jit
def everywhere(text: gl.constexpr):
    """PTX that every lane of a partition of one warp runs once."""
    x = gl.full([32], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    gl.inline_asm_elementwise(text + " mov.u32 $0, $1;", "=r,r,~{memory}", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def allocate_numbers(COUNT: gl.constexpr):
    return gl.allocate_shared_memory(gl.int32, [COUNT, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def write_number(numbers, index, x):
    """By a partition of one warp; to be followed by everywhere("bar.warp.sync ...")."""
    numbers.index(index).store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + x)


@gluon.jit
def read_number(numbers, index, WARPS: gl.constexpr = 4):
    return gl.max(numbers.index(index).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


WITH_ADDER = gl.constexpr("bar.sync $1, 288; mov.u32 $0, $1;")
TO_ADDER = gl.constexpr("bar.arrive $1, 288; mov.u32 $0, $1;")
DQ_FULL = gl.constexpr(7)
DQ_FREE = gl.constexpr(8)
