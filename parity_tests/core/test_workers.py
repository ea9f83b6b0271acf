"""Kernels compiled by processes of their own: shared by the processes of a host, whatever happens to one of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import triton

from ring_attn_cli.compile import ModelAttention, kernels_of, problems
from ring_attn_cli.compile.ship import plain_cases
from ring_attn_core.kernels import compile, shipped, workers
from ring_attn_core.kernels.bound_launch import layout, parameters
from ring_attn_core.kernels.launch import encodings
from ring_attn_core.kernels.portable import launches as portable

from ..support.compilation import PLAIN

LAUNCHES = [portable.delta(replace(PLAIN, head_dim=width, v_dim=width), "bfloat16") for width in (64, 128, 256)]


@pytest.fixture
def compilations(monkeypatch, tmp_path):
    """An empty cache and process memory; the list of kernels that this process itself compiles."""
    found = []
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))  # type: ignore
    monkeypatch.setattr(compile, "_made", {})
    monkeypatch.setattr(compile, "_begun", set())
    monkeypatch.setattr(compile, "_left", [])
    compile._find_cache.cache_clear()
    listen = lambda src, cache_hit, **_: None if cache_hit else found.append(src.fn.__name__)
    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)  # type: ignore
    yield found
    compile._find_cache.cache_clear()


@pytest.mark.slow
def test_workers_compile_what_the_cache_lacks_and_this_process_reads_it(compilations):
    assert compile.start(LAUNCHES, 90)
    assert [compile.compile_launch(launch, 90).metadata.name for launch in LAUNCHES] == ["delta"] * 3
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
    assert all(compile.compile_launch(launch, 90) is not None for launch in LAUNCHES)
    assert compilations == ["delta"] * 3


def test_a_kernel_that_another_process_holds_for_ever_is_compiled_after_the_limit(compilations, monkeypatch):
    monkeypatch.setattr(workers, "LIMIT", 0.2)
    held = LAUNCHES[0].specialization(90), compile.cache_folder()
    with workers.alone(*held):
        began = time.monotonic()
        with workers.alone(*held):
            waited = time.monotonic() - began  # without the seconds of a compilation, which hide a missing wait
        assert compile.compile_launch(LAUNCHES[0], 90) is not None
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
    assert all(compile.compile_launch(launch, 90) is not None for launch in LAUNCHES)
    assert compilations == ["delta"] * 3


PROGRAM = """
import sys
import triton
from ring_attn_core.kernels import compile
from parity_tests.core.test_workers import LAUNCHES
compiled = []
triton.knobs.compilation.listener = lambda cache_hit, **_: None if cache_hit else compiled.append(1)
compile.start(LAUNCHES, 90)
[compile.compile_launch(launch, 90) for launch in LAUNCHES]
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
    assert compile.kernel_function("delta").cache_key == compile.sources()


def test_a_shipped_kernel_is_used_without_triton_and_one_of_other_sources_or_damaged_is_not(compilations, monkeypatch, tmp_path):
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "shipped")
    of, made = LAUNCHES[0].specialization(90), compile.compile_launch(LAUNCHES[0], 90)
    shipped.save(of, compile.sources(), made)
    shipped.save(LAUNCHES[1].specialization(90), "other sources", made)
    compile._made.clear()
    compilations.clear()
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "empty"))  # type: ignore
    assert compile.is_cached(LAUNCHES[0], 90)
    assert not compile.is_cached(LAUNCHES[1], 90)
    found = compile.compile_launch(LAUNCHES[0], 90)
    assert compilations == []
    assert (found.asm["cubin"], found.asm["ptx"]) == (made.asm["cubin"], made.asm["ptx"])
    assert all(getattr(found.metadata, name) == getattr(made.metadata, name) for name in shipped.METADATA[:4])
    file = shipped._file(of, compile.sources())
    file.write_bytes(file.read_bytes()[:1000])
    compile._made.clear()
    assert compile.compile_launch(LAUNCHES[0], 90) is not None
    assert compilations == ["delta"], "a damaged file is compiled anew"


def test_a_shipped_kernel_of_hopper_has_the_parameters_of_the_compiled_one(monkeypatch, tmp_path):
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    (launch,) = (x for x in kernels_of(problems(ModelAttention(), "sm_90", 1, "contiguous", "auto")) if x.kernel == "hopper_dq")
    made = compile.compile_launch(launch, 90)
    shipped.save(launch.specialization(90), "", made)
    found = shipped.load(launch.specialization(90), "")
    assert encodings(found) == encodings(made)
    described = [parameters(launch, kernel) for kernel in (found, made)]
    assert [x.values for x in described] == [described[1].values] * 2
    of_maps = [isinstance(value, bytes) for value in described[1].values]
    assert layout(found.asm["ptx"], of_maps)[1] == layout(made.asm["ptx"], of_maps)[1]  # type: ignore


@pytest.mark.parametrize(("ranks", "layout"), [(1, "contiguous"), (3, "zigzag"), (8, "zigzag"), (8, "balanced")])
def test_the_kernels_of_a_plain_call_are_among_those_that_a_wheel_ships(ranks, layout):
    ships = plain_cases(((128, 128),))
    called = kernels_of(problems(ModelAttention(heads=24, kv_heads=3), "sm_90", ranks, layout, "auto"))
    assert {launch.specialization(90) for launch in called} <= ships.keys()
