"""``ring-attn train`` that is told to stop, by Ctrl-C or SIGTERM, leaves nothing behind, and goes on to the bit."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ring_attn_cli.processes import hear_interrupts, hold_interrupts
from ring_attn_cli.train import jax_worker
from ring_attn_cli.train.config import read
from ring_attn_cli.train.loop import lines

from .support import corpus, warm
from .support.programs import environment
from .test_train_restarts import train_as_rank

for package in ("orbax.checkpoint", "torch", "safetensors", "rich"):
    pytest.importorskip(package)


PATIENCE = 300
CODES = {"SIGINT": (130,), "SIGTERM": (143, -signal.SIGTERM)}
"""The exit codes of each signal: a shell also gives 143 to a process that SIGTERM itself has ended."""


def command(tmp_path: Path, framework: str, name: str) -> list[str]:
    """The command that trains for 40 steps, with a checkpoint every 4."""
    config = tmp_path / "config.toml"
    config.write_text(
        "steps = 40\nsave_every = 4\n[model]\ndim = 16\ndepth = 1\nheads = 2\nkv_heads = 1\nhidden = 24\n"
        f"[data]\nfolder = '{tmp_path / 'data'}'\npattern = '**/*.txt'\nheld_out = '**/*.txt'\nlength = 64\n"
        "[ring]\nranks = 2\n[evaluation]\nevery = 40\nbatches = 1\n[passkey]\nlengths = []\n"
    )
    corpus.write_texts(tmp_path / "data", (700, 61, 1, 900, 100, 3, 1300))
    where = ["--framework", framework, "--out", str(tmp_path / name)]
    return [sys.executable, "-m", "ring_attn_cli", "train", str(config), *where]


HEARS_CTRL_C = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
"""Start a command that SIGINT ends, as it does not where a shell has started these tests in the background."""


def started(tmp_path: Path, framework: str, name: str) -> subprocess.Popen[str]:
    (tmp_path / "tmp").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-c", HEARS_CTRL_C, *command(tmp_path, framework, name)],
        env=environment({"JAX_PLATFORMS": "cpu", "TMPDIR": str(tmp_path / "tmp")}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def members(group: int) -> list[str]:
    """The processes of a group that run."""
    found = subprocess.run(["ps", "-eo", "pgid=,stat=,args="], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in found if line.split()[0] == str(group) and not line.split()[1].startswith("Z")]


def train_to_the_end(framework: str, folder: Path, name: str, gloo: Any) -> None:
    """Run the command's training to its end, in processes that have imported the framework already."""
    if framework == "jax":
        _, *arguments = command(folder, framework, name)
        warm.run(arguments, framework, folder, environment({"JAX_PLATFORMS": "cpu"}))
    else:
        gloo(2, train_as_rank, read(folder / "config.toml", out=str(folder / name)))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_a_run_that_is_told_to_stop_says_so_and_goes_on_to_the_bit(framework: str, gloo, tmp_path: Path):
    """Ctrl-C reaches every process of the terminal; SIGTERM, as of kill and systemd, here the first alone."""
    for number, name in ((4, "SIGINT"), (12, "SIGTERM")):
        run, log = started(tmp_path, framework, "stopped"), tmp_path / "stopped" / "log.jsonl"
        try:
            until = time.monotonic() + PATIENCE
            while not any(line["kind"] == "step" and line["step"] > number for line in lines(log)):
                assert run.poll() is None and time.monotonic() < until
                time.sleep(0.02)
            (os.killpg if name == "SIGINT" else os.kill)(run.pid, getattr(signal, name))
            said, _ = run.communicate(timeout=600)
        finally:
            run.kill()
        assert run.returncode in CODES[name], said
        assert "Traceback" not in said
        assert ("goes on" in said) == (name == "SIGINT" or framework == "torch"), said
        until = time.monotonic() + PATIENCE
        while (left := members(run.pid)) and time.monotonic() < until:  # a process that has been told to end may take a moment
            time.sleep(0.02)
        assert left == []
        assert not list((tmp_path / "tmp").glob("ring-attn-*"))
    for name in ("stopped", "whole"):
        train_to_the_end(framework, tmp_path, name, gloo)
    ours, theirs = ((tmp_path / name / "weights" / "model.safetensors").read_bytes() for name in ("stopped", "whole"))
    assert ours == theirs


def test_ctrl_c_in_a_callback_of_the_garbage_collector_is_not_lost():
    """JAX has such a callback, out of which no exception comes."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    within = []

    def collected(phase: str, _: object) -> None:
        if phase == "start" and not within:
            within.append(phase)
            signal.raise_signal(signal.SIGINT)

    def wait() -> None:
        with hear_interrupts():
            gc.collect()
            for _ in range(50):
                time.sleep(0.1)

    gc.callbacks.append(collected)
    try:
        with pytest.raises(KeyboardInterrupt):
            wait()
    finally:
        gc.callbacks.remove(collected)
        signal.signal(signal.SIGINT, before)
    assert within == ["start"]


@pytest.mark.parametrize("presses", [0, 1, 2])
def test_a_held_ctrl_c_comes_after_the_block_and_a_second_one_at_once(presses: int):
    """In the first block of a save, where a Ctrl-C would leave orbax's threads behind."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    done = []
    try:
        with pytest.raises(KeyboardInterrupt) if presses else nullcontext():
            with hold_interrupts():
                for press in range(presses):
                    signal.raise_signal(signal.SIGINT)
                    done.append(press)
                done.append("saved")
            done.append("after")
        after = signal.getsignal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == [["saved", "after"], [0, "saved"], [0]][presses]
    assert after is signal.default_int_handler


def test_ctrl_c_lets_jax_begin_its_save_to_the_end():
    """Else the run does not know orbax's threads, and exits while they write."""
    begun = []

    class Saves:
        def save(self, *arguments: object, **named: object) -> None:
            signal.raise_signal(signal.SIGINT)
            begun.append(named["data"])

    trainer = object.__new__(jax_worker.JaxTrainer)
    trainer._checkpoints = cast(Any, Saves())
    trainer._model = trainer._optimizer = cast(Any, None)
    trainer._config = cast(Any, SimpleNamespace(to_dict=lambda: {"lora": None}))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            trainer.save(4, "position")
    finally:
        signal.signal(signal.SIGINT, before)
    assert begun == ["position"]
