"""``ring-attn train`` under ``torchrun --max-restarts``: after a rank is killed the run goes on from its newest checkpoint."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from ring_attn_cli.train.config import Config, read
from ring_attn_cli.train.loop import lines, train

from .support import corpus, warm
from .support.programs import environment

for package in ("torch", "safetensors", "rich"):
    pytest.importorskip(package)


PATIENCE = 300
RANKS = 2


def started(folder: Path) -> subprocess.Popen[str]:
    """Start the command under torchrun: 12 steps on two ranks, with a checkpoint every third."""
    corpus.write_texts(folder / "data", (700, 61, 1, 900, 100, 3, 1300))
    (folder / "config.toml").write_text(
        "steps = 12\nsave_every = 3\n[model]\ndim = 16\ndepth = 1\nheads = 2\nkv_heads = 1\nhidden = 24\ndropout_rate = 0.1\n"
        f"[data]\nfolder = '{folder / 'data'}'\npattern = '**/*.txt'\nheld_out = '**/*.txt'\nlength = 64\n"
        f"[ring]\nranks = {RANKS}\n[evaluation]\nevery = 40\nbatches = 1\n[passkey]\nlengths = []\n"
    )
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", f"--max-restarts={RANKS}"]
    train = ["-m", "ring_attn_cli", "train", str(folder / "config.toml"), "--out", str(folder / "killed")]
    command = [sys.executable, *launch, *train]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment(), start_new_session=True, **pipes)


def rank_of(agent: int, rank: int) -> int:
    """Return the process of a rank that torchrun's agent has started."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(path.joinpath("stat").read_text().rpartition(")")[2].split()[1])
            if parent == agent and f"RANK={rank}".encode() in path.joinpath("environ").read_bytes().split(b"\0"):
                return int(path.name)
        except OSError:
            continue
    raise AssertionError(f"no process of rank {rank}")


def train_as_rank(group: Any, config: Config) -> None:
    import torch

    from ring_attn_cli.train.torch_worker import RankPlace, TorchTrainer

    train(config, TorchTrainer(config, RankPlace(group, group, 0, torch.device("cpu"))), lambda kind, line: None)


def steps_of(folder: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in lines(folder / "log.jsonl") if line["kind"] == "step"]


def await_checkpoint(run: subprocess.Popen[str], folder: Path, after: int) -> int:
    """Wait until a complete checkpoint later than step ``after`` exists, and return its step."""
    until = time.monotonic() + PATIENCE
    while True:
        steps = [int(path.parent.name.rpartition("-")[2]) for path in folder.glob("checkpoints/step-*/run.json")]
        if max(steps, default=0) > after:
            return max(steps)
        assert run.poll() is None and time.monotonic() < until, run.communicate()
        time.sleep(0.02)


def join(variables: dict[str, str], pipe: Connection) -> None:
    """Join as a process that torchrun started, and count the starts in the group's store."""
    import torch
    import torch.distributed as dist

    from ring_attn_cli.train.torch_ranks import join_launched

    os.environ.update(variables)
    try:
        join_launched(torch.device("cpu"))
        pipe.send(dist.distributed_c10d._get_default_store().add("starts", 1))
        dist.destroy_process_group()
    except ValueError as error:
        pipe.send(str(error))


def said_by(variables: dict[str, str]) -> int | str:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = warm.context("torch").Process(target=join, args=(variables, theirs))
    process.start()
    try:
        assert ours.poll(60), "it waits for a rank that was there before"
        return ours.recv()
    finally:
        process.kill()
        process.join()


def test_a_restarted_rank_sees_nothing_of_the_ranks_before_in_the_store_of_torchrun():
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    variables |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_MAX_RESTARTS": "3"}
    assert [said_by(variables | {"TORCHELASTIC_RESTART_COUNT": str(number)}) for number in (0, 1, 2)] == [1, 1, 1]
    others = variables | {"WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "0"}
    assert "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on every host" in str(said_by(others))


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the process of a rank in /proc")
def test_torchrun_restarts_a_run_from_its_newest_checkpoint_to_the_bit(gloo, tmp_path):
    """Each of the two ranks is killed once. The run that nothing interrupts is one of two processes of the tests."""
    whole, killed = (tmp_path / name for name in ("whole", "killed"))
    run, saved = started(tmp_path), 0
    try:
        for rank in range(RANKS):
            saved = await_checkpoint(run, killed, saved)
            os.kill(rank_of(run.pid, rank), signal.SIGKILL)
        said, _ = run.communicate(timeout=PATIENCE)
    finally:
        os.killpg(run.pid, signal.SIGKILL) if run.poll() is None else None
        run.communicate()
    assert run.returncode == 0, said
    assert len([line for line in lines(killed / "log.jsonl") if line["kind"] == "run"]) == 1 + RANKS
    gloo(RANKS, train_as_rank, read(tmp_path / "config.toml", out=str(whole)))
    assert steps_of(killed) == steps_of(whole)
    ours, theirs = ((folder / "weights" / "model.safetensors").read_bytes() for folder in (killed, whole))
    assert ours == theirs
