"""Tests of a ``ring-attn train`` that is killed again and again: it ends with the bits of an unbroken run, losses and weights.

``KILLS=20`` kills that often; two are the default. Every second one waits until a checkpoint is being written.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from ring_attn_cli.train.config import Config, Data, Evaluation, Passkeys, RingConfig
from ring_attn_cli.train.loop import lines

from .support import corpus

for package in ("jax", "flax", "optax", "orbax.checkpoint", "torch", "safetensors", "rich"):
    pytest.importorskip(package)


KILLS = int(os.environ.get("KILLS", "2"))
PATIENCE = 300.0
"""Seconds for a run to its end, or to the moment of its kill."""


def in_torch(pipe: Connection, config: Config, rank: int, store: str) -> None:
    """Do the work of a process of the command."""
    from ring_attn_cli.train import torch_worker

    torch_worker.work(lambda kind, values: pipe.send((kind, values)), rank, config, store)


def in_jax(pipe: Connection, config: Config, rank: int, store: str) -> None:
    import jax

    from ring_attn_cli.train import jax_worker

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_compilation_cache_dir", str(Path(config.data.folder, ".compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax_worker.split_cpu(config, 1)
    jax_worker.run(config, lambda kind, values: pipe.send((kind, values)))


class Run:
    """The processes of a run, 2 of PyTorch or 1 of JAX, and what the first one tells."""

    def __init__(self, server: Any, framework: str, config: Config) -> None:
        self._folder = Path(config.out, "checkpoints")
        self._pipe, theirs = server.Pipe(duplex=False)
        work, processes = (in_torch, 2) if framework == "torch" else (in_jax, 1)
        store = str(Path(tempfile.mkdtemp(dir=config.data.folder, prefix=".store-"), "store"))
        self.processes = [server.Process(target=work, args=(theirs, config, rank, store)) for rank in range(processes)]
        for process in self.processes:
            process.start()
        theirs.close()

    def until_step(self) -> None:
        """Wait until the run tells of its next step."""
        assert self._pipe.poll(PATIENCE), "the run has said nothing"
        kind, values = self._pipe.recv()
        assert kind != "mistake", values
        if kind != "step":
            self.until_step()

    def half_written(self) -> dict[str, int]:
        """Return the folders of unfinished checkpoints, and the time at which a file last came into each."""
        found = {}
        for path in self._folder.glob("*step*"):
            if path.name.endswith((".saving", "checkpoint-tmp")):
                with suppress(FileNotFoundError):
                    found[path.name] = path.stat().st_mtime_ns
        return found

    def until_save(self) -> None:
        """Wait until a save goes on, which begins after each step."""
        before, deadline = self.half_written(), time.monotonic() + 5
        while self.half_written().items() <= before.items() and time.monotonic() < deadline:
            time.sleep(0.001)

    def kill(self, rng: random.Random) -> None:
        for process in rng.sample(self.processes, len(self.processes)):
            process.kill()
        for process in self.processes:
            process.join()

    def until_end(self) -> None:
        with suppress(EOFError):
            while self._pipe.poll(PATIENCE):
                kind, values = self._pipe.recv()
                assert kind != "mistake", values
        for process in self.processes:
            process.join(PATIENCE)
            assert process.exitcode == 0


@pytest.fixture(scope="module")
def server() -> Any:
    """Processes that have imported both frameworks when they begin."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ring_attn_cli.train.torch_worker", "ring_attn_cli.train.jax_worker"])
    return context


def config_of(folder: Path, name: str) -> Config:
    """More steps than all kills let pass, each with a checkpoint."""
    corpus.write_texts(folder / "data", (700, 61, 1, 900, 100, 3, 1300))
    return Config(
        out=str(folder / name),
        steps=4 * KILLS + 4,
        save_every=1,
        model={"dim": 16, "depth": 1, "heads": 2, "kv_heads": 1, "hidden": 24, "dropout_rate": 0.1},
        data=Data(folder=str(folder / "data"), pattern="**/*.txt", held_out="**/*.txt", length=64, accumulate=2),
        ring=RingConfig(ranks=2, chunk=20),
        evaluation=Evaluation(every=1000, batches=1),
        passkey=Passkeys(lengths=()),
    )


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_kills_at_random_moments_change_no_bit(framework: str, server: Any, tmp_path: Path):
    whole, killed = (config_of(tmp_path, name) for name in ("whole", "killed"))
    Run(server, framework, replace(whole, save_every=whole.steps)).until_end()
    rng, halves = random.Random(KILLS), 0
    for number in range(KILLS):
        run = Run(server, framework, killed)
        for _ in range(1 + rng.randrange(2)):
            run.until_step()
        if number % 2 == 0:
            run.until_save()
        time.sleep(rng.random() * (0.02 if number % 2 == 0 else 0.1))
        assert all(process.exitcode is None for process in run.processes), "the run came to its end, or failed, before the kill"
        run.kill(rng)
        halves += bool(run.half_written())
    assert not Path(killed.out, "weights").exists()
    Run(server, framework, killed).until_end()
    print(f"{KILLS} kills of {framework}, {halves} left half a checkpoint behind")
    ours, theirs = (Path(config.out, "weights", "model.safetensors").read_bytes() for config in (killed, whole))
    assert ours == theirs
    assert steps_of(killed) == steps_of(whole)
    assert [step for step, _ in steps_of(whole)] == list(range(1, whole.steps + 1))


def steps_of(config: Config) -> list[tuple[int, float]]:
    found = lines(Path(config.out, "log.jsonl"))
    return [(line["step"], line["loss"]) for line in found if line["kind"] == "step"]
