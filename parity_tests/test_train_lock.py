"""A folder has one run of ``ring-attn train`` at a time: a second is refused, in all of its processes, and a kill frees it."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ring_attn_cli.main import app
from ring_attn_cli.train import folder as lock
from ring_attn_cli.train.config import Config

from .support import corpus
from .support.warm import free_port

ROOT = str(Path(__file__).resolve().parents[1])
PATIENCE = 600
"""Seconds for processes that import a framework on a busy machine."""

HOLDER = """
import multiprocessing, sys, time
from ring_attn_cli.train import folder as lock
from ring_attn_cli.train.config import Config

if __name__ == "__main__":
    with lock.hold(Config(out=sys.argv[1])):
        rank = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
        rank.start()
        print(rank.pid, flush=True)
        time.sleep(600)
"""
"""The program of a run as the system sees it: a process with the lock, and one that it started as it starts ranks."""


def test_a_killed_run_does_not_block_the_next(tmp_path: Path):
    program, config = tmp_path / "holder.py", Config(out=str(tmp_path / "run"))
    program.write_text(HOLDER)
    run = subprocess.Popen(
        [sys.executable, str(program), config.out], env=os.environ | {"PYTHONPATH": ROOT}, stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    rank = int(run.stdout.readline())
    try:
        who = (
            rf"run is in use: process {run.pid} on {socket.gethostname()} trains there\. Wait for its end, or pass another --out"
        )
        with pytest.raises(ValueError, match=who), lock.hold(config):
            pass
        run.kill()
        run.wait()
        os.kill(rank, 0)  # the rank lives on, and does not hold the lock
        for _ in range(2):  # nor does what was refused, or came to its end
            with lock.hold(config), pytest.raises(ValueError, match=f"process {os.getpid()} on"), lock.hold(config):
                pass
    finally:
        os.kill(rank, signal.SIGKILL)
        run.kill()
        run.communicate()


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK])
def test_two_runs_begin_if_the_file_system_has_no_locks(number: int, tmp_path: Path, monkeypatch):
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    config = Config(out=str(tmp_path))
    with lock.hold(config), lock.hold(config):
        pass


def test_a_folder_that_cannot_be_written_is_refused_everywhere(tmp_path: Path):
    config, told = Config(out=str(tmp_path / "file" / "run")), []
    (tmp_path / "file").write_text("")

    def of_first(words: str) -> str:
        told.append(words)
        return told[0]

    for first in (True, False):
        with (
            pytest.raises(ValueError, match=r"run/\.lock cannot be written .* pass another --out"),
            lock.hold(config, first, of_first),
        ):
            pass
    assert told[1] == ""


@pytest.fixture
def taken(tmp_path: Path):
    """A config whose folder another run has, and the command that is to train there."""
    corpus.write_texts(tmp_path / "data", (700, 61, 1, 900, 100, 3, 1300))
    data = f"[data]\nfolder = '{tmp_path / 'data'}'\npattern = '**/*.txt'\nheld_out = '**/*.txt'\nlength = 64\n"
    path = tmp_path / "config.toml"
    path.write_text(f"out = '{tmp_path / 'run'}'\n[ring]\nranks = 2\n[passkey]\nlengths = []\n{data}")
    with lock.hold(Config(out=str(tmp_path / "run"))):
        yield ["train", str(path)]


def test_the_command_is_refused_in_one_line(taken: list[str], tmp_path: Path):
    for package in ("torch", "safetensors"):
        pytest.importorskip(package)
    done = CliRunner().invoke(app, taken)
    assert done.exit_code == 2, done.output
    assert f"run is in use: process {os.getpid()} on " in done.output
    assert not {path.name for path in (tmp_path / "run").iterdir()} - {".lock", ".cache"}


@pytest.mark.exhaustive
def test_every_process_of_a_program_is_refused_alike(taken: list[str], tmp_path: Path):
    """Two processes of JAX; torchrun's are told by a broadcast, ``of_first`` below."""
    for package in ("jax", "flax", "optax", "orbax.checkpoint", "safetensors"):
        pytest.importorskip(package)
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "ring_attn_cli.main", *taken, "--framework", "jax", "--coordinator", address]
    environment = os.environ | {"PYTHONPATH": ROOT, "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)  # the tests' devices
    logs = [tmp_path / f"log-{process}" for process in range(2)]
    started = []
    for process, log in enumerate(logs):
        with log.open("w") as file:
            of_process = [*command, "--process", f"{process}/2"]
            started.append(subprocess.Popen(of_process, env=environment, stdout=file, stderr=subprocess.STDOUT))
    try:
        assert [process.wait(PATIENCE) for process in started] == [2, 2], [log.read_text() for log in logs]
    finally:
        for process in started:
            process.kill()
    for log in logs:
        assert f"run is in use: process {os.getpid()} on " in log.read_text()
    assert not (tmp_path / "run" / "log.jsonl").exists()


def test_torch_ranks_hear_the_first(gloo):
    pytest.importorskip("torch")
    assert gloo(2, on_rank) == ["rank 0 says so"] * 2


def on_rank(group) -> str:
    from ring_attn_cli.train import torch_worker

    return torch_worker.share_text(f"rank {group.rank()} says so", group)
