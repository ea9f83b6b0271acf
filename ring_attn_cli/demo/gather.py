"""Run all processes of the demo at once, show their progress, and collect their results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ..processes import Crews, Message
from . import exactness, report
from .exactness import PARTS
from .gathered import EXACT, Gathered
from .settings import MASK, DemoSettings


def gather(settings: DemoSettings, frameworks: list[str], console: Console) -> Gathered:
    """Run the demo and return its results. Print the table of attention's errors as soon as all of them are known."""
    gathered = Gathered(frameworks)
    with _Board(settings, console) as board, _started(settings, frameworks, board) as crews:
        for message in crews.messages():
            board.show(message)
            if gathered.take(message):
                console.print(report.exactness(gathered.rows, frameworks))
    return gathered


@contextmanager
def _started(settings: DemoSettings, frameworks: list[str], board: _Board) -> Iterator[Crews]:
    """Start the processes of the demo, yield them, and end them on exit."""
    package = __name__.rpartition(".")[0]
    inputs = exactness.inputs(settings.tokens)
    with Crews(settings.patience) as crews:
        if "PyTorch" in frameworks:
            board.add("PyTorch", f"starting {settings.ranks} processes", len(PARTS) + settings.steps)
            members = [(rank, settings, inputs, crews.store) for rank in range(settings.ranks)]
            crews.start("PyTorch", f"{package}.torch_side", members)
        if "JAX" in frameworks:
            board.add("JAX", "starting 1 process", len(PARTS) + settings.steps)
            crews.start("JAX", f"{package}.jax_side", [(settings, inputs)])
        board.add(EXACT, "float64 attention in numpy", exactness.KV_HEADS)
        crews.start(EXACT, f"{package}.exactness", [(inputs, MASK, kv_head) for kv_head in range(exactness.KV_HEADS)])
        yield crews


class _Board(Progress):
    """Progress bars with the current stage, one for each crew, which is a named group of processes."""

    def __init__(self, settings: DemoSettings, console: Console) -> None:
        name, words = TextColumn("{task.fields[crew]:7}"), TextColumn("{task.description}")
        super().__init__(name, BarColumn(20), TimeElapsedColumn(), words, console=console)
        self._settings = settings
        self._bars: dict[str, TaskID] = {}
        self._trained: dict[str, int] = {}

    def add(self, crew: str, words: str, total: int) -> None:
        self._bars[crew] = self.add_task(words, crew=crew, total=total)

    def show(self, message: Message) -> None:
        bar = self._bars[message.crew]
        if message.kind == "stage":
            self.update(bar, description=message.data)
            return
        self.advance(bar)
        if message.kind == "step":
            step = self._trained[message.crew] = self._trained.get(message.crew, 0) + 1
            self.update(bar, description=f"training: step {step} of {self._settings.steps}, loss {message.data.loss:.3f}")
