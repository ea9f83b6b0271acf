"""The run of ``ring-attn train``: check the config, lock the folder, start the ranks, and show their progress."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..processes import Terminated, WorkerGroups, check_count, check_installed, hear_interrupts
from . import data, events, folder, picture, torchrun
from .config import Config
from .loop import LOG

NEEDS = {"torch": ("torch", "safetensors"), "jax": ("jax", "flax", "optax", "orbax.checkpoint", "safetensors")}
PATIENCE = 1800.0
"""Seconds without a message after which a run in PyTorch fails, except under torchrun. A step can take minutes."""


@dataclass(frozen=True)
class Program:
    """The identity of this process in a JAX program. With ``coordinator`` "auto" the launcher sets both numbers."""

    coordinator: str
    processes: int | None = None
    process: int | None = None

    @classmethod
    def of(cls, coordinator: str | None, process: str | None) -> Program:
        """Parse ``--coordinator``, "auto" or HOST:PORT of process 0, and ``--process``, None with "auto", else such as "0/4"."""
        if coordinator == "auto" and process is None:
            return cls(coordinator)
        port = re.fullmatch(r".*:(\d+)", coordinator or "")
        number = re.fullmatch(r"(\d+)/(\d+)", process or "")
        if not (port and 0 < int(port[1]) < 65536 and number and int(number[1]) < int(number[2])):
            raise ValueError(
                f"--coordinator {coordinator} with --process {process} says of no process which it is: pass auto, or "
                "--coordinator HOST:PORT --process 0/4, to the other processes 1/4 and so on"
            )
        return cls(port[0], int(number[2]), int(number[1]))


def run(config: Config, framework: str, program: Program | None = None) -> None:
    """Train, or resume the run in ``config.out``, and write log, checkpoints, weights and, if possible, ``train.png`` there."""
    if framework not in NEEDS:
        raise ValueError(f"unknown framework {framework!r}: choose one of {', '.join(NEEDS)}")
    check_installed(NEEDS[framework])
    if program is not None and framework != "jax":
        raise ValueError("--coordinator is for JAX: start PyTorch on several machines with torchrun")
    folder.check(config, framework)
    first = program is None or program.process in (None, 0)  # with coordinator "auto" no process knows yet which it is
    prints = torchrun.is_first() if framework == "torch" else first
    console = Console(stderr=True, highlight=False, quiet=not prints)
    if both := data.check(config):
        console.print(f"trained on and held out too: {both}")
    if missing := events.explain_missing():
        console.print(missing)
    try:
        with hear_interrupts():
            _run_jax(config, program) if framework == "jax" else _run_torch(config)
    except (KeyboardInterrupt, Terminated):
        step = folder.newest(config, framework)
        words = f"from step {step}, its newest checkpoint" if step else "from the beginning, for it has no checkpoint yet"
        console.print(f"Interrupted. Started again, the run in {config.out} goes on {words}.")
        raise


def _run_jax(config: Config, program: Program | None) -> None:
    from . import jax_worker

    jax_worker.split_cpu(config, 1 if program is None else program.processes)
    if program is not None:
        jax_worker.join(program.coordinator, program.processes, program.process)
    first = jax_worker.is_first()
    with folder.hold(config, first, jax_worker.share_text):
        with TrainWatch(config, Console(highlight=False, quiet=not first)) as watch:
            jax_worker.run(config, watch)
        if first:
            _finish(config)


def _run_torch(config: Config) -> None:
    if torchrun.has_started():
        from . import torch_worker

        first = torchrun.is_first()
        with TrainWatch(config, Console(highlight=False, quiet=not first)) as watch:
            torch_worker.work_under_torchrun(config, watch)
        if first:
            _finish(config)
        return
    ranks = config.ring.ranks * config.ring.replicas
    check_count(ranks, "ring.ranks times ring.replicas:")
    with folder.hold(config):
        with WorkerGroups(PATIENCE) as groups:
            members = [(rank, config, groups.store) for rank in range(ranks)]
            groups.start("PyTorch", "ring_attn_cli.train.torch_worker", members)
            with TrainWatch(config, Console(highlight=False)) as watch:
                for message in groups.messages():
                    watch(message.kind, message.data)
        _finish(config)


def _finish(config: Config) -> None:
    drawn = ["train.png"] if find_spec("matplotlib") is not None else []
    for name in drawn:
        picture.draw(Path(config.out, LOG), Path(config.out, name))
    sys.stdout.flush()
    shown = [] if events.explain_missing() else [events.FOLDER]
    written = LOG, *drawn, *shown, "weights", *(["adapters"] if config.lora is not None else []), "checkpoints"
    Console(highlight=False).print(f"Written: {', '.join(str(Path(config.out, name)) for name in written)}")


EVERY = 10.0
"""Least seconds between two printed steps if the output is not a terminal."""


class TrainWatch:
    """A progress bar with the latest step and a line for each evaluation; without a terminal, a line every ``EVERY`` seconds."""

    def __init__(self, config: Config, console: Console) -> None:
        self._config, self._console = config, console
        columns = MofNCompleteColumn(), BarColumn(8), TimeRemainingColumn(), TextColumn("{task.description}")
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task("starting", total=config.steps)
        self._found: list[str] = []
        self._shown = float("-inf")

    def __enter__(self) -> TrainWatch:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def __call__(self, kind: str, line: dict[str, Any]) -> None:
        step = line["step"]
        if kind == "run":
            began = f", from step {step}" if step else ""
            trained = f" ({line['trained']:,} train, {line['frozen']:,} are frozen)" if line["frozen"] else ""
            where = f"{line['devices']} x {line['device']}{began}, into {self._config.out}"
            for words in (f"{line['parameters']:,} weights{trained} on {where}", *line["changed"]):
                self._console.print(escape(words))
            stage = "first step" if line["device"] == "cpu" else "compiling kernels, first step"
            if step >= self._config.steps:
                stage = ""
                self._console.print(f"step {step} of {self._config.steps}: nothing is left to train; pass more --steps")
            self._progress.update(self._task, completed=step, description=stage)
        elif kind == "step":
            mfu = "" if line["mfu"] is None else f", MFU {line['mfu']:.1%}"
            speed = f"{line['tokens_per_second']:,.0f} tokens/s, {line['tflops']:.3g} TFLOP/s{mfu}"
            words = f"loss {line['loss']:.4f}, {speed}, {line['memory'] / 2**30:.2f} GiB"
            self._progress.update(self._task, completed=step, description=words)
            if not self._console.is_terminal and time.monotonic() - self._shown > EVERY:
                self._shown = time.monotonic()
                self._console.print(f"step {step}: {words}")
        elif kind == "evaluation":
            known = (f"{end}: {x:.3f}" for end, x in zip(line["ends"], line["by_position"], strict=True) if x is not None)
            self._console.print(f"step {step}: held-out loss {line['loss']:.4f}; up to position {', '.join(known)}")
        elif kind == "passkey":
            self._found.append(f"{line['accuracy']:.0%} of {line['length']} tokens")
            if len(self._found) == len(self._config.passkey.lengths):
                self._console.print(f"step {step}: passkeys found: {', '.join(self._found)}")
                self._found = []
