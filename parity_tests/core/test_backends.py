"""Which backend computes a problem, and what is said when it is not the one that was hoped for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ring_attn_core import causal
from ring_attn_core.kernels import backends, calls, hopper, steps
from ring_attn_core.kernels.backends import runnable, select
from ring_attn_core.kernels.calls import call_of
from ring_attn_core.kernels.problem import Problem
from ring_attn_core.kernels.tiles import TileConfig

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def measured_triton(monkeypatch):
    """What "auto" takes is judged as with a Triton that the Hopper forward is measured with."""
    monkeypatch.setattr(backends, "triton_release", lambda: (3, 6))


def on_a_gpu(backend: str) -> Problem:
    shape = (1, 256, 2, 64)
    where = 1, "zigzag", causal(), None, None
    return Problem(shape, shape, shape, ("bfloat16", "bfloat16", "bfloat16"), "cuda", *where, None, None, 0.0, (), backend, 90)


def test_kernels_that_compile_are_taken():
    automatic, named = (runnable(on_a_gpu(backend)) for backend in ("auto", "triton"))
    assert automatic is not None
    assert named is not None
    assert automatic.hopper
    assert not named.hopper
    assert call_of(on_a_gpu("triton"), "triton").q_runs == 1, "one rank has one run, whatever the layout"


def test_auto_passes_over_what_is_slower_and_takes_it_by_name():
    wide = replace(on_a_gpu("auto"), q_shape=(1, 256, 2, 192), k_shape=(1, 256, 2, 192))
    assert [select(problem) for problem in (on_a_gpu("auto"), wide)] == ["hopper", "triton"]
    assert select(wide, "hopper") == "hopper"


def test_auto_leaves_the_hopper_forward_to_compilers_that_do_not_spill(monkeypatch):
    monkeypatch.setattr(backends, "triton_release", lambda: (3, 9))
    assert [select(on_a_gpu("auto"), backend) for backend in ("auto", "hopper")] == ["triton", "hopper"]


@pytest.mark.parametrize(
    ("tiles", "reason"),
    [
        (TileConfig(48, 64, 4, 1), "does not compile"),
        (TileConfig(256, 256, 8, 4, True), "bytes of shared memory, and sm_90 has 232448"),
    ],
)
def test_kernels_that_cannot_run_give_way_under_auto_only(monkeypatch, tiles, reason):
    """The problem and the reason are named, once; ranks learn of it before anything is sent."""
    monkeypatch.setattr(calls, "choose_tiles", lambda *_: tiles)
    monkeypatch.setattr(hopper, "refusal_of_backward", lambda _: "the portable kernels, whose tiles these are, are to be tried")
    for make in (steps.delta, steps.forward, steps.dq, steps.dkv):
        make.cache_clear()
    of = "bfloat16 heads of 64 and 64"
    with (
        pytest.warns(UserWarning, match=f"hopper: its kernel .*{reason}.*{of}.*triton"),
        pytest.warns(UserWarning, match=f"triton: its kernel .*{reason}.*{of}.*blockwise"),
    ):
        assert runnable(on_a_gpu("auto")) is None
    with pytest.raises(ValueError, match=reason):
        runnable(on_a_gpu("triton"))
    for make in (steps.delta, steps.forward, steps.dq, steps.dkv):
        make.cache_clear()
