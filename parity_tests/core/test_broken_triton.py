"""Tests of a broken Triton or cache: "auto" says so in one sentence and goes on, a backend by name is refused."""

from __future__ import annotations

import errno
import threading
from typing import Any

import pytest
import triton

from ring_attn_core.kernels import backends, compile, launch
from ring_attn_core.kernels.backends import runnable, select
from ring_attn_core.kernels.compile import triton_release
from ring_attn_core.kernels.obstacles import cause_of
from ring_attn_core.kernels.ptx import changed_for_products
from ring_attn_core.plan.balanced_layout import BalancedLayout
from ring_attn_core.problem.options import Options
from ring_attn_core.problem.problem import Problem


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    """Each test compiles anew, and leaves nothing that it broke."""
    monkeypatch.setattr(backends, "triton_release", lambda: (3, 6))
    monkeypatch.setattr(compile, "_left", [])
    monkeypatch.setattr(compile, "_made", {})
    monkeypatch.setattr(backends, "start", lambda *_: None)  # a worker would not see what a test breaks here
    cached = compile._find_cache, compile.broken_triton, compile.is_interpreted
    for each in cached:
        each.cache_clear()
    yield
    for each in cached:
        each.cache_clear()


def on_a_gpu(backend: str, tokens: int = 16384, **options: Any) -> Problem:
    """Return a problem whose kernels test_backends.py has compiled into Triton's cache."""
    shape = (1, tokens, 16, 128)
    given = Options(backend=backend, **options)
    return Problem(shape, shape, shape, ("bfloat16", "bfloat16", "bfloat16"), "cuda", 1, given, capability=90)


def test_a_name_that_only_the_start_needs_is_missed_before_the_start(monkeypatch):
    """As if a newer Triton described its TMA descriptors in another way: no kernel that reads by them can be started."""
    monkeypatch.setattr(launch, "encodings", lambda kernel: kernel.metadata.no_such_name)
    monkeypatch.setattr("ring_attn_core.kernels.bound_launch.encodings", launch.encodings)
    with pytest.warns(UserWarning, match="forward cannot be started as Triton .* compiles it: AttributeError") as said:
        assert runnable(on_a_gpu("auto"), passes=("forward",)) is None
    assert [str(each.message).split(":")[0] for each in said] == ["hopper", "triton"]
    with pytest.raises(ValueError, match="cannot be started"):
        runnable(on_a_gpu("triton"), passes=("forward",))


@pytest.mark.parametrize("error", [ImportError("libtriton.so: cannot open"), AttributeError("no attribute 'knobs'")])
def test_a_triton_that_does_not_start_is_an_objection(monkeypatch, error):
    def broken() -> bool:
        raise error

    monkeypatch.setattr(compile, "is_interpreted", broken)
    problem = on_a_gpu("auto")
    with pytest.warns(UserWarning, match="^triton: the package triton does not start .*'blockwise' runs this instead"):
        assert runnable(problem) is None
    for name in ("hopper", "triton"):
        with pytest.raises(ValueError, match=f"the package triton does not start \\({type(error).__name__}: .*install it anew"):
            select(problem, name)


def test_auto_says_why_no_kernel_takes_a_balanced_layout():
    problem = on_a_gpu("auto", tokens=256, layout=BalancedLayout((((128, 128), (0, 128)),), 256))
    with pytest.warns(UserWarning, match="^triton: the runs of a rank are not in order.*'blockwise' runs this instead, slower"):
        assert runnable(problem) is None


def test_a_compile_that_failed_is_not_tried_again(monkeypatch):
    tried = []

    def fails(source: Any, **_: Any) -> None:
        tried.append(source)
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(triton, "compile", fails)
    for tokens in (256, 320, 384):
        with pytest.warns(UserWarning, match="RuntimeError: PassManager::run failed"):
            assert runnable(on_a_gpu("auto", tokens)) is None
    kernels = [source.fn.__name__ for source in tried]
    assert len(kernels) == len(set(kernels)) > 1


def test_an_assembler_that_fails_is_quoted_without_the_names_of_its_files():
    said = [
        "PTXAS error: Internal Triton PTX codegen error",
        "`ptxas` stderr:",
        "ptxas /tmp/tmpab1.ptx, line 3; fatal   : no memory",
        "",
        "Repro command: /ptxas /tmp/tmpab1.ptx",
    ]
    assert cause_of(RuntimeError("\n".join(said))) == "RuntimeError: ptxas its PTX, line 3; fatal   : no memory"
    error = ValueError("at 3:1:\n  x = tma.load()\n      ^")
    error.__cause__ = AttributeError("module has no attribute 'load'")
    assert cause_of(error) == "AttributeError: module has no attribute 'load'"


@pytest.mark.exhaustive
def test_a_cache_without_room_is_left_for_a_folder_of_the_process(monkeypatch, tmp_path):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "full"))  # type: ignore
    really = triton.compile

    def full(source: Any, **given: Any) -> Any:
        if triton.knobs.cache.dir == str(tmp_path / "full"):  # type: ignore
            raise OSError(errno.ENOSPC, "No space left on device")
        return really(source, **given)

    monkeypatch.setattr(triton, "compile", full)
    with pytest.warns(UserWarning, match="cannot write its cache, .*full .No space left on device.*TRITON_CACHE_DIR") as said:
        call = runnable(on_a_gpu("triton"), passes=("forward",))
    assert len(said) == 1
    assert call is not None


@pytest.mark.parametrize("binary", [b"", b"\x7fELF\x02cut"])
def test_a_damaged_binary_names_the_folder_to_delete(monkeypatch, binary):
    really = triton.compile

    def damaged(source: Any, **given: Any) -> Any:
        kernel = really(source, **given)
        kernel.asm = {**kernel.asm, "cubin": binary}
        return kernel

    monkeypatch.setattr(triton, "compile", damaged)
    with pytest.warns(UserWarning, match="binary of its kernel .*forward is damaged .*delete .*, where Triton keeps it"):
        assert runnable(on_a_gpu("auto"), passes=("forward",)) is None


def test_others_kernels_are_compiled_as_ever_while_ours_are():
    """Triton's hook is one for the process: a thread that compiles its own kernel meanwhile is not given our assembler."""
    stages: dict[str, Any] = {"ptx": "theirs", "cubin": "theirs"}
    answers = []

    def elsewhere() -> None:
        hook = triton.knobs.runtime.add_stages_inspection_hook  # type: ignore
        answers.extend([hook(), hook(None, stages, None, None, 90)])

    with changed_for_products((3, 9)):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert answers == [("", ""), None]
    assert stages == {"ptx": "theirs", "cubin": "theirs"}


@pytest.mark.parametrize(("version", "number"), [("3.6.0", (3, 6)), ("3.10rc1", (3, 10)), ("4.0.0+git1", (4, 0)), ("", (0, 0))])
def test_versions_are_read(monkeypatch, version, number):
    monkeypatch.setattr(compile, "triton_version", lambda: version)
    assert triton_release() == number


def test_a_version_without_a_number_is_newer_than_any_that_was_tried(monkeypatch):
    monkeypatch.setattr(compile, "triton_version", lambda: "main")
    assert triton_release() > compile.NEWEST_TRIED
