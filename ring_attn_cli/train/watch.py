"""The terminal display of a training run."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .config import Config

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
        """Show a line of the log. ``kind``: "run", "step", "evaluation" or "passkey"."""
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
