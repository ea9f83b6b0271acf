"""Tests of backends: the choice for a problem, and the message when it is not the one that was hoped for."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import triton
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import tma

from ring_attn_core.kernels import backends, compile, obstacles, steps
from ring_attn_core.kernels import call as calls
from ring_attn_core.kernels.backends import PASSES, runnable, select
from ring_attn_core.kernels.call import call_of
from ring_attn_core.kernels.portable import launches as portable
from ring_attn_core.kernels.tile_sizes import TileConfig
from ring_attn_core.problem.options import Options
from ring_attn_core.problem.problem import Problem

from ..support.selection import first


@pytest.fixture(autouse=True)
def measured_triton(monkeypatch):
    """Let "auto" choose as with a Triton that the Hopper forward is measured with."""
    monkeypatch.setattr(backends, "triton_release", lambda: (3, 6))


def on_a_gpu(backend: str, dim: int = 128, **of_options: Any) -> Problem:
    """Return a problem whose kernels are those of parity_tests/support/compilation.py, so that they are compiled once."""
    shape = (1, 16384, 16, dim)
    options = Options(backend=backend, **of_options)
    return Problem(shape, shape, shape, ("bfloat16", "bfloat16", "bfloat16"), "cuda", 1, options, capability=90)


def test_kernels_that_compile_are_taken():
    automatic, named = (runnable(on_a_gpu(backend)) for backend in ("auto", "triton"))
    assert automatic is not None
    assert named is not None
    assert automatic.hopper
    assert not named.hopper
    assert call_of(on_a_gpu("triton"), "triton").q_runs == 1, "one rank has one run, whatever the layout"


def test_auto_passes_over_what_is_slower_and_takes_it_by_name():
    exact = replace(on_a_gpu("auto"), dtypes=("float32",) * 3)
    assert [select(problem) for problem in (on_a_gpu("auto"), exact)] == ["hopper", "triton"]
    assert select(exact, "triton_tf32") == "triton_tf32"


@pytest.mark.parametrize("backend", ["flash", "flash4", "cudnn"])
def test_backends_that_add_tiles_in_another_order_are_refused(backend):
    with pytest.raises(ValueError, match=r"its order of additions depends on the ranks.* takes \'hopper\'"):
        select(on_a_gpu(backend, order="global"), backend)


def test_an_order_keeps_its_strategy_on_gpus_that_reach_each_other():
    problem = replace(on_a_gpu("auto", order="global"), ranks=2)
    assert problem.reaching is None
    assert problem.strategy == "global_order"


def test_auto_takes_hopper_for_wide_heads():
    wide = replace(on_a_gpu("auto"), q_shape=(1, 256, 2, 192), k_shape=(1, 256, 2, 192), v_shape=(1, 256, 2, 64))
    assert select(wide) == "hopper"


def test_an_untried_triton_is_named_once_and_passed_over(monkeypatch):
    monkeypatch.setattr(backends, "triton_release", lambda: (3, 10))
    monkeypatch.setattr(backends, "triton_version", lambda: "3.10.0")
    with pytest.warns(UserWarning, match="hopper: Triton 3.10.0 is newer than 3.9, .*backend='triton' runs this") as said:
        call = runnable(on_a_gpu("auto"))
    assert call is not None and not call.hopper
    assert len(said) == 1
    assert select(on_a_gpu("auto"), "hopper") == "hopper", "who asks for it by name has it"


@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_a_pass_that_spills_goes_to_the_portable_kernels_alone(monkeypatch, passes):
    """One warning names the kernel and its bytes; by name it is taken as it is."""
    monkeypatch.setattr(obstacles, "MAX_STACK", {f"hopper_{passes}": -1})
    with pytest.warns(UserWarning, match=f"in the {passes} Triton .* compiles its kernel hopper_{passes} with .* bytes") as said:
        call = runnable(on_a_gpu("auto"))
    assert call is not None
    assert len(said) == 1
    kernels = {x.kernel for x in (*steps.of_forward(call, 1), *steps.of_backward(call, 1))}
    left = {"hopper_forward", "hopper_backward"} - {f"hopper_{passes}"}
    assert {x for x in kernels if x in ("hopper_forward", "hopper_backward")} == left
    assert {"forward"} <= kernels if passes == "forward" else {"dq", "dkv"} <= kernels
    named = runnable(on_a_gpu("hopper"))
    assert named is not None and not named.portable


@pytest.mark.parametrize("feature", [{"softcap": 30.0}, {"dropout_rate": 0.1}, {}])
def test_a_backward_that_is_slower_than_the_portable_one_is_left_to_it(monkeypatch, feature):
    """Heads of 64 with softcap or dropout, which Triton 3.9 gives too few registers; who asks by name has what he asked for."""
    monkeypatch.setattr(backends, "_obstacles", lambda call, problem, passes: {})
    portable = {}
    for release in ((3, 8), (3, 9)):
        monkeypatch.setattr(backends, "triton_release", lambda release=release: release)
        portable[release] = [runnable(on_a_gpu(name, 64, **feature)).portable for name in ("auto", "hopper")]  # pyright: ignore[reportOptionalMemberAccess]
    assert portable[3, 8] == [frozenset(), frozenset()]
    assert portable[3, 9] == [frozenset({"backward"} if feature else ()), frozenset()]


@pytest.mark.slow
@pytest.mark.parametrize("gone", first(["jit", "copy_tile"]))
def test_a_triton_whose_names_have_changed_is_one_sentence_and_auto_goes_on(monkeypatch, tmp_path, gone):
    """As if async_load, or gluon.jit, were called something else in the next release, of which the cache has no kernel."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))  # type: ignore
    kernels = [name for name in sys.modules if name.startswith("ring_attn_core.kernels.hopper.")]
    for name in kernels:
        if not name.endswith(("launches", "supports")):
            monkeypatch.delitem(sys.modules, name)
    attribute, module = {"copy_tile": ("async_load", tma), "jit": ("jit", gluon)}[gone]
    monkeypatch.delattr(module, attribute, raising=False)
    monkeypatch.delattr(module, "async_copy_global_to_shared", raising=False)
    monkeypatch.setattr(compile, "_made", {})
    monkeypatch.setattr(backends, "start", lambda *_: None)  # a worker has the names
    with pytest.warns(
        UserWarning, match=r"^hopper: in the forward its kernel hopper_forward does not compile with Triton 3\."
    ) as said:
        call = runnable(on_a_gpu("auto"))
    assert len(said) == 1
    assert "\n" not in str(said[0].message)
    assert call is not None and not call.hopper
    with pytest.raises(ValueError, match="has no attribute"):
        runnable(on_a_gpu("hopper"))


CACHED = steps.in_one_pass, steps.forward, steps.dq, steps.dkv, portable.delta, portable.dq, portable.dkv


@pytest.fixture
def with_tiles(monkeypatch):
    """Give every kernel these tiles."""

    def choose(tiles: TileConfig) -> None:
        monkeypatch.setattr(calls, "choose_tiles", lambda *_: tiles)
        for make in CACHED:
            make.cache_clear()

    yield choose
    for make in CACHED:
        make.cache_clear()


@pytest.mark.parametrize("backend", first(["triton", "auto"], most=1))
def test_a_cache_that_cannot_be_written_is_named_once_and_kernels_are_taken(monkeypatch, with_tiles, tmp_path, backend):
    if backend == "triton":
        with_tiles(TileConfig(64, 32, 4, 1))  # compiled in a second
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "file" / "cache"))  # type: ignore
    monkeypatch.setattr(compile, "_made", {})
    compile._find_cache.cache_clear()
    with pytest.warns(UserWarning, match="Triton cannot write its cache, .*file/cache .*TRITON_CACHE_DIR") as said:
        call = runnable(on_a_gpu(backend), passes=PASSES[:1])
    assert len(said) == 1
    assert call is not None and call.hopper == (backend == "auto")


@pytest.mark.parametrize(
    ("tiles", "reason"),
    [
        (TileConfig(48, 64, 4, 1), "does not compile"),
        (TileConfig(64, 64, 4, 7, True), "bytes of shared memory, and sm_90 has 232448"),
    ],
)
def test_kernels_that_cannot_run_give_way_under_auto_only(monkeypatch, with_tiles, tiles, reason):
    """The problem and the reason are named, once; ranks learn of it before anything is sent."""
    with_tiles(tiles)
    taken = steps._takes
    monkeypatch.setattr(steps, "_takes", lambda call, name: name == "forward" and taken(call, name))
    of = "bfloat16 heads of 128 and 128"
    with (
        pytest.warns(UserWarning, match=f"hopper: in the backward its kernel .*{reason}.*{of}.*triton"),
        pytest.warns(UserWarning, match=f"triton: .*its kernel .*{reason}.*{of}.*blockwise"),
    ):
        assert runnable(on_a_gpu("auto")) is None
    with pytest.raises(ValueError, match=reason):
        runnable(on_a_gpu("triton"))
