"""The kernels' launches and what the compiler makes of them, for GPUs that need not be there."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import pytest

from ring_attn_core.kernels import backends, steps
from ring_attn_core.kernels.call import RingCall, call_of
from ring_attn_core.kernels.compile import compile_launch, kernel_function
from ring_attn_core.kernels.launch import Array, Descriptor, Launch, Scalar
from ring_attn_core.kernels.portable import launches as portable
from ring_attn_core.kernels.tile_sizes import choose_tiles, pad_width, shared_memory
from ring_attn_core.problem.options import Options
from ring_attn_core.problem.problem import Problem

from ..support.compilation import EVERYTHING, PLAIN, resources
from ..support.selection import first


def launches(call: RingCall) -> list[Launch]:
    """Every launch of a ring: of the first, a middle and the last step, and of a ring of one."""
    places = [(True, True), (True, False), (False, False), (False, True)]
    made = [portable.delta(call, call.dtype)]
    made += [make(call, *place) for make in (steps.forward, portable.dq) for place in places]
    made += [portable.dkv(call, *place) for place in places[:3]]
    if "key_mask" in call.array_names:
        made.append(portable.unpack_key_mask(call.batch, call.kv_local))
    if "dropout_seed" in call.array_names:
        made.append(portable.philox_keys(call.batch, call.heads))
    if "extents" in call.array_names:
        made.append(steps.extent_bounds(call))
    return made


EVERY_FEATURE = replace(PLAIN, array_names=EVERYTHING, zero_masked=True, fully_masked=True, softcap=30.0, dropout_rate=0.1)
VARIED = [PLAIN, replace(PLAIN, packed=True, q_runs=2, k_runs=2), EVERY_FEATURE]
VARIED += [replace(call, hopper=True) for call in VARIED]
EVERY_FEATURE = VARIED[2] = replace(EVERY_FEATURE, array_names=EVERYTHING | {"key_extents"})
KINDS = ["plain", "packed", "everything"]


@pytest.mark.parametrize("call", VARIED, ids=[*KINDS, *(f"hopper {kind}" for kind in KINDS)])
def test_arguments_are_the_kernels_parameters_in_their_order(call):
    """A JAX launch hands buffers over by order: inputs as the parameters come, then the outputs."""
    for launch in launches(call):
        parameters = [name for name, _ in launch.arguments]
        names = kernel_function(launch.kernel).arg_names
        assert sorted(parameters, key=names.index) == [name for name in names if name in parameters]
        buffers = [
            x.name for name, x in sorted(launch.arguments, key=lambda each: names.index(each[0])) if not isinstance(x, Scalar)
        ]
        assert buffers == [*launch.inputs, *(output.name for output in launch.written)]
        assert {*names} >= {name for name, _ in launch.constants}


def test_state_is_overwritten_in_place_until_the_last_step():
    over = lambda launch: [output.over for output in launch.outputs]
    assert over(steps.forward(PLAIN, True, False)) == [None, None]
    assert over(steps.forward(PLAIN, False, False)) == ["out_in", "lse_in"]
    assert over(steps.forward(PLAIN, False, True)) == [None, "lse_in"], "out changes its dtype"
    assert over(steps.forward(replace(PLAIN, dtype="float32"), False, True)) == ["out_in", "lse_in", "rest_in"]
    assert over(portable.dq(PLAIN, False, False)) == ["dq_in"]
    assert over(portable.dkv(replace(PLAIN, packed=True), False, False)) == ["dkv_in"]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_kernels_of_a_training_step_do_not_grow_with_lengths_batches_and_heads(ranks, monkeypatch):
    """50 calls of one head size, some padded, by Hopper's kernels, whose backward has three designs, by length."""
    monkeypatch.setattr(backends, "triton_release", lambda: (3, 6))
    draw, found = random.Random(0), defaultdict(list)
    for group in (*(4,) * 25, *(1,) * 25):
        tokens, kv_heads = 2 * draw.randrange(50, 10_000), draw.randrange(1, 17)
        q, k = ((draw.randrange(1, 5), tokens, heads, 128) for heads in (kv_heads * group, kv_heads))
        k = (q[0], *k[1:])
        options = Options(length=ranks * tokens - (ranks > 1) * draw.randrange(2))
        problem = Problem(q, k, k, ("bfloat16", "bfloat16", "bfloat16"), "cuda", ranks, options, capability=90)
        call = call_of(problem, "hopper")
        needed = {x.specialization(90) for make in (steps.of_forward, steps.of_backward) for x in make(call, ranks)}
        ahead = {launch.specialization(90) for launch in backends.launches(problem)}
        found[group, problem.plan.length == ranks * tokens].append((needed, ahead))
    for calls in found.values():
        every = set().union(*(needed for needed, _ in calls))
        assert all(every <= ahead for _, ahead in calls)
    assert len(set().union(*(ahead for calls in found.values() for _, ahead in calls))) <= {1: 7, 2: 24, 4: 24}[ranks]


@pytest.mark.parametrize("width", [1, 16, 63, 64, 65, 96, 128, 192, 256])
def test_a_tile_holds_a_head_in_a_power_of_two(width):
    assert pad_width(width) >= width
    assert pad_width(width).bit_count() == 1
    assert pad_width(width) >= 64, "Triton 3.6 multiplies shorter rows wrongly on Hopper"


OFTEN = [(80, 128), (100, 128), (90, 256), (89, 512)]
"""The GPUs and the widths of heads that test-all compiles every feature for: each GPU once, and each width."""

RARELY = [(89, 128), (90, 64), (90, 128), (80, 512), (90, 512), (100, 512)]
SIZED = [(80, PLAIN), *((gpu, replace(EVERY_FEATURE, head_dim=dim, v_dim=dim)) for gpu, dim in OFTEN + RARELY)]


@pytest.mark.parametrize(
    ("capability", "call"),
    first(SIZED, most=1 + len(OFTEN)),
    ids=lambda x: f"sm_{x}" if isinstance(x, int) else f"{x.head_dim} plain" if x == PLAIN else str(x.head_dim),
)
def test_the_kernels_compile_and_fit_into_shared_memory(capability, call):
    call = replace(call, capability=capability)
    for launch in (steps.forward(call, True, True), portable.dq(call, True, True), portable.dkv(call, True, True)):
        assert compile_launch(launch, capability).metadata.shared <= shared_memory(capability), launch.kernel


@pytest.mark.parametrize(
    ("capability", "version"), [(80, "8.7"), (90, "8.7"), (100, "8.7"), (120, "8.7"), (103, "8.8"), (121, "8.8")]
)
def test_old_assemblers_read_the_ptx(capability, version):
    """XLA's own, in a JAX program: of CUDA 12.8 or newer."""
    kernel = compile_launch(portable.delta(replace(PLAIN, capability=capability), "bfloat16"), capability)
    assert f".version {version}\n" in kernel.asm["ptx"]


@pytest.mark.parametrize(
    ("kernel", "dim", "stack", "reloads"),
    [
        ("forward", 128, 8, 0),
        ("dkv", 128, 64, 7),
        pytest.param("dq", 128, 0, 0, marks=pytest.mark.exhaustive),
        *(pytest.param(kernel, 64, 0, 0, marks=pytest.mark.full) for kernel in ("forward", "dq")),
    ],
)
def test_the_loops_of_the_benchmark_hardly_spill(kernel, dim, stack, reloads):
    """At most so many bytes of stack a thread on Hopper, and reloads in the loop without a mask, of some 500 instructions."""
    call = replace(PLAIN, head_dim=dim, v_dim=dim)
    used, reloaded, products = resources(
        compile_launch(getattr(steps if kernel == "forward" else portable, kernel)(call, True, True), 90)
    )
    assert used <= stack
    assert reloaded <= reloads
    assert products > 0, "no wgmma in the binary"


def test_a_head_that_fills_its_tile_is_read_by_tma():
    by = lambda call: {type(x) for name, x in steps.forward(call, True, True).arguments if name in ("q_BSHD", "k_BTGD", "v_BTGE")}
    assert by(PLAIN) == {Descriptor}
    assert by(replace(PLAIN, head_dim=96)) == {Array}
    assert by(replace(PLAIN, capability=80)) == {Array}
    assert by(replace(PLAIN, tma=False)) == {Array}


def test_tiles_are_chosen_for_every_kernel_dtype_and_size():
    for kernel in ("forward", "dq", "dkv", "delta"):
        for dtype in ("bfloat16", "float16", "float32"):
            for width in (64, 128, 256, 512):
                for capability in (80, 86, 90, 100, 120):
                    assert choose_tiles(kernel, dtype, width, width, capability).warps in (4, 8)
