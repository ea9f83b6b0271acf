"""Values that are columns of keys: which backend takes them, what its launches read, what is sent, and what is refused."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ring_attn_core.kernels import backends, steps
from ring_attn_core.kernels.backends import runnable, select
from ring_attn_core.kernels.binary import stack_bytes
from ring_attn_core.kernels.call import call_of
from ring_attn_core.kernels.compile import compile_launch, kernel_function
from ring_attn_core.kernels.launch import Array, Descriptor, Scalar
from ring_attn_core.kernels.portable import launches as portable
from ring_attn_core.kernels.tile_sizes import WIDEST, WIDEST_TAIL, shared_memory
from ring_attn_core.problem.checks import check_v_dim
from ring_attn_core.problem.options import Options
from ring_attn_core.problem.problem import Problem
from ring_attn_core.problem.traffic import traffic

from ..support.compilation import EVERYTHING, PLAIN
from ..support.selection import first

LATENT = replace(PLAIN, kv_heads=1, head_dim=576, v_dim=512, packed=True, values_in_keys=True)
"""Heads of DeepSeek-V2 and V3 in absorbed form: a latent vector of 512 columns and 64 rotary ones."""
EVERY_FEATURE = {
    "array_names": EVERYTHING | {"key_extents"},
    "zero_masked": True,
    "fully_masked": True,
    "softcap": 30.0,
    "dropout_rate": 0.1,
}


def on_a_gpu(head_dim: int = 576, v_dim: int = 512, of_v: bool = True, **changes: Any) -> Problem:
    """A problem with one key head; ``of_v``: the values are columns of k. ``changes``: of the problem, and the backend."""
    k, options = (1, 1024, 1, head_dim), Options(backend=changes.pop("backend", "auto"), v_dim=v_dim if of_v else None)
    of = {"device": "cuda", "capability": 90, "dtypes": ("bfloat16",) * 3, "ranks": 1} | changes
    return Problem((1, 1024, 16, head_dim), k, (*k[:3], v_dim), options=options, **of)


@pytest.fixture(autouse=True)
def measured_triton(monkeypatch):
    monkeypatch.setattr(backends, "triton_release", lambda: (3, 6))


def test_the_portable_forward_takes_wider_keys_if_they_hold_the_values():
    assert select(on_a_gpu()) == "triton"
    assert select(on_a_gpu(WIDEST + WIDEST_TAIL, WIDEST)) == "triton"
    assert select(on_a_gpu(192, 128)) == "hopper"
    assert select(on_a_gpu(of_v=False)) == "blockwise"
    assert select(on_a_gpu().ordinary) == "blockwise", "its backward"


@pytest.mark.parametrize(("head_dim", "v_dim"), [(WIDEST + WIDEST_TAIL + 1, WIDEST), (640, 500), (576, 576)])
def test_keys_beyond_the_widest_are_refused_with_the_limits(head_dim, v_dim):
    with pytest.raises(ValueError, match=rf"at most {WIDEST}, and head_dim is"):
        select(on_a_gpu(head_dim, v_dim, backend="triton"), "triton")


@pytest.mark.slow
def test_a_backend_by_name_is_compiled_for_the_forward_alone():
    call = runnable(on_a_gpu(backend="triton"), passes=("forward",))
    assert call == call_of(on_a_gpu(backend="triton"), "triton")
    assert (call.tail, call.packed, call.values_in_keys) == (64, True, True)


@pytest.mark.parametrize(
    ("head_dim", "v_dim", "tail"), [(576, 512, 64), (512, 512, 0), (80, 64, 16), (24, 16, 0), (192, 100, 92), (256, 64, None)]
)
def test_a_tile_of_keys_is_read_once(head_dim, v_dim, tail):
    """Its launch reads no v, unless too many columns of k remain beside the values."""
    call = replace(LATENT, head_dim=head_dim, v_dim=v_dim)
    launch = portable.forward(call, True, True)
    read = {parameter for parameter, x in launch.arguments if not isinstance(x, Scalar) and x.name in ("q", "kv")}
    tails = {"q_tail_BSHD", "k_tail_BTGD"} if tail else set()
    assert call.tail == tail
    assert read == {"q_BSHD", "k_BTGD", *tails} | ({"v_BTGE"} if tail is None else set())
    assert {"k", "v"}.isdisjoint(launch.inputs)
    constants = dict(launch.constants)
    assert constants["K_STRIDE"] == constants["V_STRIDE"] == head_dim
    assert constants["V_COLUMN"] == 0


@pytest.mark.parametrize("hopper", [False, True], ids=["portable", "hopper"])
@pytest.mark.parametrize("width", [(576, 512), (192, 128), (256, 192), (64, 64)], ids=str)
def test_arguments_are_the_kernels_parameters_in_their_order(width, hopper):
    """A JAX launch hands buffers over by order: inputs as the parameters come, then the outputs."""
    call = replace(LATENT, head_dim=width[0], v_dim=width[1], hopper=hopper, **EVERY_FEATURE)
    for place in ((True, True), (False, False)):
        launch = steps.forward(call, *place)
        names = kernel_function(launch.kernel).arg_names
        order = sorted(launch.arguments, key=lambda each: names.index(each[0]))
        buffers = [x.name for _, x in order if not isinstance(x, Scalar)]
        assert buffers == [*launch.inputs, *(output.name for output in launch.written)]
        assert {*names} >= {name for name, _ in launch.constants}
    assert launch.kernel == ("hopper_forward" if hopper and width[0] <= 256 else "forward")


def test_main_and_tail_that_fill_their_tiles_are_read_by_tma():
    names = "q_BSHD", "q_tail_BSHD", "k_BTGD", "k_tail_BTGD"
    by = lambda call: {type(x) for name, x in steps.forward(call, True, True).arguments if name in names}
    assert by(LATENT) == by(replace(LATENT, head_dim=640)) == by(replace(LATENT, head_dim=512)) == {Descriptor}
    assert by(replace(LATENT, head_dim=528)) == {Array}, "16 columns of a tail of 64: TMA would read the next query head's"
    assert by(replace(LATENT, head_dim=564, v_dim=500)) == {Array}
    assert by(replace(LATENT, capability=80)) == {Array}


def test_the_launch_of_an_ordinary_call_has_no_tail():
    for call in (PLAIN, replace(PLAIN, packed=True), replace(PLAIN, head_dim=512, v_dim=448)):
        launch = portable.forward(call, True, True)
        assert "BLOCK_TAIL" not in dict(launch.constants)
        assert {"q_tail_BSHD", "k_tail_BTGD"}.isdisjoint(name for name, _ in launch.arguments)


SIZES = [(90, 576, 512, 112), (80, 576, 512, 0), (100, 576, 512, 0), (90, 512, 512, 16), (90, 192, 128, 0), (90, 320, 256, 0)]
"""GPU, head_dim, v_dim and the most bytes of stack of a thread without features: those of Triton 3.6; 3.9 needs none."""


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "head_dim", "v_dim", "stack"), first(SIZES, 1))
def test_the_forward_hardly_spills(capability, head_dim, v_dim, stack):
    call = replace(LATENT, capability=capability, head_dim=head_dim, v_dim=v_dim)
    kernel = compile_launch(portable.forward(call, True, True), capability)
    assert kernel.metadata.shared <= shared_memory(capability)
    assert stack_bytes(kernel.asm["cubin"]) <= stack


@pytest.mark.parametrize(("capability", "width"), first([(90, 576), (80, 576), (100, 576), (89, 576), (89, 640), (100, 512)], 0))
def test_with_every_feature_the_forward_fits_into_shared_memory(capability, width):
    call = replace(LATENT, capability=capability, head_dim=width, **EVERY_FEATURE)
    for of in (call, replace(call, head_dim=width - 256, v_dim=256)):
        assert compile_launch(portable.forward(of, True, True), capability).metadata.shared <= shared_memory(capability)


@pytest.mark.parametrize("strategy", ["ring", "direct", "two_way", "gather", "ulysses"])
def test_k_travels_alone_in_the_forward(strategy):
    problem = on_a_gpu(ranks=4, device="cpu", capability=0, framework="torch")
    problem = replace(problem, k_shape=(1, 1024, 1, 576), options=replace(problem.options, strategy=strategy))
    (forward, backward), (of_both, as_before) = traffic(problem), traffic(problem.ordinary)
    assert backward == as_before
    saved = 512 / (576 + 512)
    keys = of_both.bytes - (0 if strategy != "ulysses" else of_queries(problem))
    assert of_both.bytes - forward.bytes == keys * saved
    assert forward.messages == of_both.messages


def of_queries(problem: Problem) -> int:
    """The bytes of q, out and lse that a rank sends under Ulysses, to each of the other three."""
    heads = problem.q_shape[2] // 4
    return 3 * problem.q_shape[1] * heads * (2 * 576 + 2 * 512 + 4)


def test_a_problem_and_its_options_tell_calls_with_and_without_v_apart():
    problem = on_a_gpu()
    assert Options.read(problem.options.text, problem.options.counts) == problem.options
    assert problem.fingerprint() != problem.ordinary.fingerprint()
    assert problem.ordinary.ordinary is problem.ordinary
    assert problem.ordinary == on_a_gpu(of_v=False)


@pytest.mark.parametrize(
    ("v_dim", "v_shape", "message"),
    [
        (None, None, "v is None: pass v, or v_dim="),
        (0, None, "v_dim must be an int of 1 to 576, k's head_dim: .* got 0"),
        (577, None, "v_dim must be an int of 1 to 576, .* got 577"),
        (2.0, None, "v_dim must be an int of 1 to 576, .* got 2.0"),
        (True, None, "v_dim must be an int of 1 to 576, .* got True"),
        (512, (1, 8, 1, 64), r"v_dim is for v=None, .* got v_dim=512 and v of shape \[1, 8, 1, 64\]: leave out v_dim, or v"),
        ("x", (1, 8, 1, 64), "v_dim is for v=None"),
    ],
)
def test_a_v_dim_that_does_not_fit_is_refused_in_words(v_dim, v_shape, message):
    with pytest.raises(ValueError, match=message):
        check_v_dim(v_dim, (1, 8, 1, 576), v_shape)


def test_a_v_dim_that_fits_is_taken():
    assert check_v_dim(512, (1, 8, 1, 576), None) == 512
    assert check_v_dim(64, (1, 8, 1, 576), (1, 8, 1, 64)) is None, "v is an array"
    assert check_v_dim(None, (1, 8, 1, 576), (1, 8, 1, 64)) is None


def test_hopper_reads_the_values_at_the_first_columns_of_the_keys():
    launch = steps.forward(replace(LATENT, head_dim=192, v_dim=128, hopper=True), True, True)
    (v,) = [x for name, x in launch.arguments if name == "v_BTGE"]
    assert (v.name, v.shape, v.block[-1]) == ("kv", (1, 16384, 1, 192), 128)
    assert dict(launch.constants)["V_COLUMN"] == 0
