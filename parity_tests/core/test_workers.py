"""Kernels compiled by processes of their own: shared by the processes of a host, whatever happens to one of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from ring_attn_core.kernels import compile, workers
from ring_attn_core.kernels.portable import launches as portable

from ..support.compilation import PLAIN

triton = pytest.importorskip("triton")

LAUNCHES = [portable.delta(replace(PLAIN, head_dim=width, v_dim=width), "bfloat16") for width in (64, 128, 256)]


@pytest.fixture
def compilations(monkeypatch, tmp_path):
    """An empty cache and process memory; the list of kernels that this process itself compiles."""
    found = []
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))
    monkeypatch.setattr(compile, "_made", {})
    monkeypatch.setattr(compile, "_begun", set())
    monkeypatch.setattr(compile, "_left", [])
    compile._find_cache.cache_clear()
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda src, cache_hit, **_: None if cache_hit else found.append(src.fn.__name__)
    )
    yield found
    compile._find_cache.cache_clear()


@pytest.mark.slow
def test_workers_compile_what_the_cache_lacks_and_this_process_reads_it(compilations):
    assert compile.start(LAUNCHES, 90)
    assert [compile.compiled(launch, 90).metadata.name for launch in LAUNCHES] == ["delta"] * 3
    assert compilations == [], "no kernel is compiled here"
    assert all(compile.is_cached(launch, 90) for launch in LAUNCHES)
    compile._made.clear()
    assert compile.start(LAUNCHES, 90) == [], "nothing is left to compile"


def test_kernels_for_later_are_compiled_after_those_needed_at_once(compilations, monkeypatch):
    started = []
    monkeypatch.setattr(workers, "_start_worker", lambda jobs, cache: started.append([of for of, _ in jobs]))
    compile.start(LAUNCHES[1:2], 90, later=[LAUNCHES[0], *LAUNCHES[1:]])
    assert started == [[LAUNCHES[i].specialization(90) for i in (1, 0, 2)]], "one worker, its urgent kernel first"


def test_the_kernels_of_a_killed_worker_are_compiled_by_who_needs_them(compilations):
    for worker in compile.start(LAUNCHES, 90):
        worker.kill()
        worker.wait()
    assert all(compile.compiled(launch, 90) is not None for launch in LAUNCHES)
    assert compilations == ["delta"] * 3


def test_a_kernel_that_another_process_holds_for_ever_is_compiled_after_the_limit(compilations, monkeypatch):
    monkeypatch.setattr(workers, "LIMIT", 0.2)
    held = LAUNCHES[0].specialization(90), compile.cache_folder()
    with workers.alone(*held):
        began = time.monotonic()
        with workers.alone(*held):
            waited = time.monotonic() - began  # without the seconds of a compilation, which hide a missing wait
        assert compile.compiled(LAUNCHES[0], 90) is not None
    assert waited >= 0.2
    assert compilations == ["delta"]


@pytest.mark.parametrize("missing", ["processes", "locks"])
def test_without_processes_or_locks_this_process_compiles(compilations, monkeypatch, missing):
    def refused(*_, **__):
        raise OSError("none left")

    if missing == "processes":
        monkeypatch.setattr(workers, "_start_worker", refused)
    else:
        monkeypatch.setattr("fcntl.flock", refused)
    compile.start(LAUNCHES, 90)
    assert all(compile.compiled(launch, 90) is not None for launch in LAUNCHES)
    assert compilations == ["delta"] * 3


PROGRAM = """
import sys
import triton
from ring_attn_core.kernels import compile
from parity_tests.core.test_workers import LAUNCHES
compiled = []
triton.knobs.compilation.listener = lambda cache_hit, **_: None if cache_hit else compiled.append(1)
compile.start(LAUNCHES, 90)
[compile.compiled(launch, 90) for launch in LAUNCHES]
print(len(compiled))
"""


@pytest.mark.exhaustive
def test_processes_that_start_at_once_compile_each_kernel_once(tmp_path):
    """As the ranks of a host do. A worker counts in no process, so none counts a kernel."""
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    ranks = [
        subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    assert [rank.communicate()[0].strip() for rank in ranks] == ["0"] * 4
    assert len([*tmp_path.glob("*/delta.cubin")]) == 3


def test_a_kernels_key_depends_on_its_sources_alone(compilations):
    """Triton's own also depends on the kernels that a process has hashed before, so a worker's result would not be found."""
    assert not compile.is_cached(LAUNCHES[0], 90)
    assert compile.kernel_function("delta").cache_key == compile._sources()
