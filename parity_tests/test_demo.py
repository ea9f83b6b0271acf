"""The demo: what it writes, how it judges, and that no process fails in silence or outlives it."""

from __future__ import annotations

import json
import os
import sys
import time
from multiprocessing import active_children
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from ring_attn_cli.demo import report
from ring_attn_cli.demo.report import Check, check_losses, is_passed
from ring_attn_cli.demo.run import find_frameworks, run
from ring_attn_cli.demo.settings import DemoSettings, read_standard_library
from ring_attn_cli.main import app
from ring_attn_cli.processes import Failure, Message, WorkerGroups, choose_context

pytestmark = pytest.mark.usefixtures("warm_workers")


# --- the whole of it ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "trained"),
    [("torch", {"PyTorch": 3}), pytest.param("both", {"PyTorch": 3, "JAX": 3}, marks=pytest.mark.exhaustive)],
)
def test_the_quick_demo_keeps_every_bound_and_writes_its_three_files(framework, trained, tmp_path: Path):
    """XLA compiles the part of JAX for a minute, which other tests of the comparison and of training run too."""
    for package in ("torch", "jax", "flax", "optax", "typer"):
        pytest.importorskip(package)
    done = CliRunner().invoke(
        app, ["demo", "--quick", "--framework", framework, "--ranks", "2", "--tokens", "512", "--out", str(tmp_path)]
    )
    assert done.exit_code == 0, done.output
    assert done.stdout.count("bounds are kept") + done.stdout.count("bound is kept") == 2, "of attention, and of the losses"
    for picture, start in (("losses.png", b"\x89PNG"), ("plan.svg", b"<svg")):
        assert (tmp_path / picture).read_bytes().startswith(start)
    written = json.loads((tmp_path / "demo.json").read_text())
    assert written["passed"] is True and written["attention"]["passed"] is True
    assert len(written["checks"]) == 2 * len(trained) - 1 and all(each["value"] <= each["bound"] for each in written["checks"])
    assert {name: len(losses) for name, losses in written["losses"].items()} == trained


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ranks", "0"), "a ring needs at least 1 rank"),
        (("--tokens", "7"), "pass at least 8"),
        (("--steps", "1"), "pass at least 2"),
        (("--layout", "spiral"), "unknown layout 'spiral': choose one of contiguous"),
        (("--framework", "numpy"), "choose one of both, torch, jax"),
        (("--quick", "--full"), "--quick and --full exclude each other"),
    ],
)
def test_a_mistake_is_answered_in_one_line(arguments: tuple[str, ...], words: str):
    done = CliRunner().invoke(app, ["demo", *arguments])
    assert done.exit_code == 2
    assert words in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_computed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("ring_attn_cli.demo.run.compute", lambda *_: pytest.fail("the demo has begun"))
    (tmp_path / "demo.json").mkdir()
    with pytest.raises(ValueError, match=r"demo\.json is a folder: name a file in it"):
        run(DemoSettings.make(True), "both", tmp_path)


def test_a_framework_without_its_packages_is_left_out_in_words(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ring_attn_cli.demo.run.find_spec", lambda package: None if package == "flax" else package)
    frameworks, left_out = find_frameworks("both")
    assert frameworks == ["PyTorch"]
    assert left_out == ['JAX is left out, for flax is not installed: run pip install "ring-attn[demo]"']
    with pytest.raises(ValueError, match="flax is not installed"):
        find_frameworks("jax")


# --- the judge ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1.1e-6, float("nan"), float("inf")])
def test_a_missed_bound_is_named_and_ends_with_status_1(value: float):
    checks = [Check("PyTorch loss: last over first", 0.9, 0.99), Check("JAX loss: last over first", value, 1e-6)]
    kept, missed = SimpleNamespace(passed=True), SimpleNamespace(passed=False)
    assert [is_passed(kept, each) for each in (checks[:1], checks, [])] == [True, False, False]  # type: ignore[arg-type]
    assert not is_passed(missed, checks[:1])  # type: ignore[arg-type]
    printed = said(report.conclude(checks, 1.0))
    assert "Missed JAX loss: last over first" in printed and "1 of 2 bounds are missed" in printed
    assert "PyTorch" not in printed


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ({"PyTorch": [5.5, 5.6], "JAX": [5.5, 5.6]}, ["PyTorch loss: last over first", "JAX loss: last over first"]),
        ({"PyTorch": [5.5, 5.0], "JAX": [5.5, 5.0002]}, ["loss: PyTorch against JAX, at the worst step"]),
        ({"PyTorch": [5.5, 5.2, 5.0], "JAX": [5.5, float("nan"), 5.0]}, ["loss: PyTorch against JAX, at the worst step"]),
        ({"JAX": [5.5, float("nan")]}, ["JAX loss: last over first"]),
        ({"PyTorch": [5.5, 5.0], "JAX": [5.5, 5.00001]}, []),
    ],
)
def test_losses_must_fall_and_agree(losses: dict[str, list[float]], words: list[str]):
    assert [check.what for check in check_losses(losses) if not check.passed] == words


# --- the text -----------------------------------------------------------------------------------------------------------


def test_steps_read_consecutive_stretches_of_the_standard_library():
    whole = np.concatenate([DemoSettings(tokens=100).batch(step)[0] for step in range(4)])
    assert whole.tolist() == list(read_standard_library(400))


def test_text_begins_anew_where_it_ends():
    much = read_standard_library(100_000_000)
    assert len(much) == 100_000_000
    start = much.index(much[:4096], 4096)
    assert much[start : start + 4096] == much[:4096]


def test_quick_gives_way_to_what_is_asked_for():
    assert DemoSettings.make(True, tokens=None, steps=7) == DemoSettings(tokens=2048, steps=7)
    assert DemoSettings.make(False, True, tokens=512, steps=None) == DemoSettings(tokens=512, steps=12)
    assert DemoSettings.make(False, tokens=None, steps=None) == DemoSettings()


# --- the processes ------------------------------------------------------------------------------------------------------


def work(tell, how: str) -> None:
    """Do the work of a process in these tests."""
    print("some notice")
    if how == "raise":
        raise RuntimeError("the ring is broken")
    if how == "die":
        os._exit(7)
    if how == "hang":
        time.sleep(600)
    tell("said", how)


def reports(hows: tuple[str, ...], patience: float = 60) -> list[Message]:
    with WorkerGroups(patience) as groups:
        groups.start("group", "parity_tests.test_demo", [(how,) for how in hows])
        return list(groups.messages())


@pytest.mark.skipif(sys.platform != "linux", reason="processes are spawned elsewhere")
@pytest.mark.parametrize(("members", "gpu", "start"), [(2, False, "forkserver"), (2, True, "spawn"), (1, False, "spawn")])
def test_ranks_on_cpus_are_forked_after_one_import(monkeypatch: pytest.MonkeyPatch, members: int, gpu: bool, start: str):
    imported: list[str] = []
    monkeypatch.setattr("ring_attn_cli.processes.preload", imported.append)
    monkeypatch.setattr("ring_attn_cli.processes.Path", lambda _: SimpleNamespace(exists=lambda: gpu))
    assert choose_context("module", members).get_start_method() == start
    assert imported == (["module"] if start == "forkserver" else [])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hows", "patience", "words"),
    [
        (("hang", "raise"), 60, "group, process 1 failed: RuntimeError: the ring is broken"),
        (("hang", "die"), 60, "group, process 1 ended with exit code 7"),
        (("hang",), 2, "no process has reported for 2 s; still at work: group"),
    ],
)
def test_a_failure_is_told_and_ends_every_process(hows: tuple[str, ...], patience: float, words: str):
    before = active_children()
    with pytest.raises(Failure, match=words):
        reports(hows, patience)
    assert set(active_children()) <= set(before)


def test_a_failure_shows_what_the_process_printed():
    with pytest.raises(Failure, match=r"(?s)some notice.*Traceback"):
        reports(("raise",))


@pytest.mark.slow
def test_reports_arrive():
    assert sorted(reports(("good", "better"))) == [("group", "said", "better"), ("group", "said", "good")]


def said(printed: object) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(printed)
    return capture.get()
