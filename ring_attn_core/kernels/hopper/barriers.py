"""The barriers between the warps of Hopper's kernels, and the numbers that warps pass through shared memory.

An mbarrier signals a full buffer; its phase flips at each use. ``a -> b``: a arrives at the mbarrier, and b waits for it.

    forward    q_full [groups]       a group's q                         producer, TMA -> the group
               k_full, v_full        a stage of keys, of values          producer, TMA -> consumers
               work_full [1]         the announced next query tile       producer      -> consumers
    backward   keys_full [1]         the program's k and v               producer, TMA -> consumers
               q_full, dout_full     a stage of q, of dout               producer, TMA -> consumers
               own_full [1]          a tile with rows to be zeroed       producer, TMA -> producer
               full [4]              numbers of a step are stored        scout         -> producer
               free [4]              these numbers have been read        producer      -> scout

Named barriers signal that a buffer is free, or let warps wait for each other. ``arrive`` does not wait; ``sync`` waits until the
number of threads in the last column have arrived. A group is a consumer warpgroup. ``groups``: the number of groups, 2 or 3 in
the forward, 2 in the backward.

    forward    K_FREE + stage        a stage of keys has been read       consumers arrive, producer syncs     128 groups + 32
               V_FREE + stage        a stage of values has been read     consumers arrive, producer syncs     128 groups + 32
               WORK_READ             the announcement has been read      consumers arrive, producer syncs     128 groups + 32
               Q_FREE + group        a group's q may be overwritten      the group arrives, producer syncs    128 + 32
               VALUES_CLEAN          values that no query sees are 0     consumers sync                       128 groups
    backward   Q_READ + stage        a stage of q has been read          consumers arrive, producer syncs     256 + 32
               DOUT_READ + stage     a stage of dout has been read       consumers arrive, producer syncs     256 + 32
               DQ_FULL               dq of a step is in shared memory    consumers arrive, adder syncs        256 + 32
               DQ_FREE               TMA has read this dq                adder arrives, consumers sync        256 + 32
    wide dkv   Q_READ, DOUT_READ     as in the backward
               P_FULL                p of a step is in shared memory     the first warpgroup arrives, the second syncs     256
               P_READ                the second warpgroup has read p     the second arrives, the first syncs               256
    wide dq    the forward's         as in the forward, but VALUES_CLEAN: keys that no query sees are 0
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .gluon import constexpr_function

WARP = gl.constexpr(32)
WARPGROUP = gl.constexpr(128)

FIRST_FREE = gl.constexpr(6)
"""The first of the named barriers 0 to 15 that Triton leaves free: Triton uses 0, 1 and one for each partition.

The barrier numbers K_FREE to P_READ are offsets from FIRST_FREE.
"""

K_FREE = gl.constexpr(0)
V_FREE = gl.constexpr(2)
WORK_READ = gl.constexpr(4)
Q_FREE = gl.constexpr(5)
VALUES_CLEAN = gl.constexpr(8)
FORWARD_STAGES = gl.constexpr(2)
"""Largest number of stages of keys and of values for which the forward has barriers."""

Q_READ = gl.constexpr(0)
DOUT_READ = gl.constexpr(3)
DQ_FULL = gl.constexpr(7)
DQ_FREE = gl.constexpr(8)
P_FULL = gl.constexpr(7)
P_READ = gl.constexpr(8)
BACKWARD_STAGES = gl.constexpr(3)
"""Largest number of stages of q and of dout for which the backward has barriers."""


@constexpr_function
def with_one_warp(groups):
    """Return the number of threads in ``groups`` consumer warpgroups plus one warp (the producer or the adder)."""
    return groups * WARPGROUP.value + WARP.value


@constexpr_function
def among_consumers(groups):
    """Return the number of threads in ``groups`` consumer warpgroups."""
    return groups * WARPGROUP.value


@constexpr_function
def barrier_text(operation, threads):
    return f"bar.{operation} $1, {threads}; mov.u32 $0, $1;"


@gluon.jit
def arrive(number, THREADS: gl.constexpr, WARPS: gl.constexpr):
    """Arrive at a named barrier with all WARPS of the calling partition, without waiting. Call ``arrive`` after the instructions
    that use the last loads from the released buffer, because bar.arrive does not wait for loads in flight."""
    named_barrier(barrier_text("arrive", THREADS), number, WARPS)


@gluon.jit
def sync(number, THREADS: gl.constexpr, WARPS: gl.constexpr):
    """Arrive at a named barrier with all WARPS of the calling partition, and wait until THREADS have arrived."""
    named_barrier(barrier_text("sync", THREADS), number, WARPS)


@gluon.jit
def named_barrier(TEXT: gl.constexpr, number, WARPS: gl.constexpr):
    """Run the PTX instruction TEXT once in each thread of the calling partition; its operand $1 is the barrier's number."""
    x = gl.full([WARPS * WARP], FIRST_FREE + number, gl.int32, gl.BlockedLayout([1], [WARP], [WARPS], [0]))
    gl.inline_asm_elementwise(TEXT, "=r,r,~{memory}", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def release(number, GROUPS: gl.constexpr, WARPS: gl.constexpr = 4):
    """Signal the producer that this partition (WARPS warps) has read a buffer. GROUPS: number of consumer warpgroups."""
    arrive(number, with_one_warp(GROUPS), WARPS)


@gluon.jit
def acquire(number, GROUPS: gl.constexpr):
    """Wait, as the producer, until GROUPS consumer warpgroups have released a buffer."""
    sync(number, with_one_warp(GROUPS), 1)


@gluon.jit
def sync_warp():
    """Synchronize the lanes of a one-warp partition, and make their stores visible to each other."""
    every_lane("bar.warp.sync 0xffffffff;")


@gluon.jit
def every_lane(TEXT: gl.constexpr):
    """Run PTX once in each lane of a one-warp partition."""
    x = gl.full([WARP], 0, gl.int32, gl.BlockedLayout([1], [WARP], [1], [0]))
    gl.inline_asm_elementwise(TEXT + " mov.u32 $0, $1;", "=r,r,~{memory}", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def allocate_barriers(COUNT: gl.constexpr):
    """Allocate COUNT mbarriers, which the caller initializes."""
    return gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())


@gluon.jit
def allocate_numbers(COUNT: gl.constexpr):
    """Allocate COUNT int32 numbers in shared memory."""
    return gl.allocate_shared_memory(gl.int32, [COUNT, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def write_number(numbers, index, x):
    """Write ``x`` to ``numbers[index]`` in shared memory from a one-warp partition; call ``sync_warp`` afterwards."""
    numbers.index(index).store(gl.full([1], 0, gl.int32, gl.BlockedLayout([1], [WARP], [1], [0])) + x)


@gluon.jit
def read_number(numbers, index, WARPS: gl.constexpr = 4):
    """Return ``numbers[index]``, read from shared memory in all WARPS of the calling partition."""
    return gl.max(numbers.index(index).load(gl.BlockedLayout([1], [WARP], [WARPS], [0])), 0)
