"""The run of ``ring-attn generate``: start the generation and show text and progress as they arrive."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ..processes import WorkerGroups, check_installed
from .settings import GenerateSettings
from .text import Text, harmless

NEEDS = {"torch": ("torch", "safetensors"), "jax": ("jax", "flax", "safetensors")}
WARM = 3
"""New tokens before the speed is measured: the first waits for the prompt, the next two may compile the decode step."""
PATIENCE = 1800.0
"""Seconds without a message after which a run in PyTorch fails. A chunk of a long prompt, or compiling, can take minutes."""


def run(settings: GenerateSettings) -> None:
    check_installed(NEEDS[settings.framework])
    text = Text(settings)
    with GenerateWatch(text, Console(stderr=True, highlight=False)) as watch:
        if settings.framework == "jax":
            from . import jax_worker

            jax_worker.run(settings, text.ids, watch)
            return
        with WorkerGroups(PATIENCE) as groups:
            members = [(rank, settings, text.ids, groups.store) for rank in range(settings.ranks)]
            groups.start("PyTorch", "ring_attn_cli.generate.torch_worker", members)
            for message in groups.messages():
                watch(message.kind, message.data)


class GenerateWatch:
    """A context manager that shows a progress bar for the prompt, then the text as it arrives, and after a success the speed."""

    def __init__(self, text: Text, console: Console) -> None:
        self._text, self._console = text, console
        columns = TextColumn("prompt"), BarColumn(20), TextColumn("{task.description}"), TimeRemainingColumn()
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task(f"{len(text.ids):,} tokens", total=len(text.ids))
        self._began = time.monotonic()
        self._came: list[float] = []

    def __enter__(self) -> GenerateWatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._progress.stop()
        if self._came:
            self._write(self._text.end() + "\n")
            if kind is None:
                self._console.print(speed(self._began, self._came))

    def __call__(self, kind: str, what: Any) -> None:
        """Show ``what``: for kind "loaded" a text, for "prefilled" (done, total) prompt tokens, for "token" a new token id."""
        if kind == "loaded":
            self._console.print(escape(what))
            self._began = time.monotonic()
            self._progress.start()
        elif kind == "prefilled":
            done, total = what
            rate = done / max(time.monotonic() - self._began, 1e-9)
            words = f"{done:,} of {total:,} tokens, {rate:,.0f} tokens/s"
            self._progress.update(self._task, completed=done, description=words)
            if done == total:
                self._progress.stop()
        elif kind == "token":
            self._came.append(time.monotonic())
            self._write(self._text.add(what))

    def _write(self, words: str) -> None:
        sys.stdout.write(harmless(words) if sys.stdout.isatty() else words)
        sys.stdout.flush()


def speed(began: float, came: Sequence[float]) -> str:
    """Return the seconds to the first token, and tokens/s after the first ``WARM`` tokens if there are more, in words."""
    words = f"{len(came):,} tokens, the first after {came[0] - began:,.2f} s"
    if len(came) <= WARM:
        return words
    each = max(came[-1] - came[WARM - 1], 1e-9) / (len(came) - WARM)
    return f"{words}, from number {WARM + 1} on {1 / each:,.1f} tokens/s, {1000 * each:,.1f} ms a token"
