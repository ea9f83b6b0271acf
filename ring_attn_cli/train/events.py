"""TensorBoard's events of a training run, written by ``torch.utils.tensorboard`` if torch and tensorboard are installed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FOLDER = "tensorboard"
TAGS = {
    "loss": "train/loss",
    "norm": "train/gradient_norm",
    "rate": "train/learning_rate",
    "tokens_per_second": "speed/tokens_per_second",
    "tflops": "speed/tflops",
    "mfu": "speed/mfu",
    "memory": "speed/memory_bytes",
}


def explain_missing() -> str:
    """Return why no events are written, and the pip command that changes it; "" if torch and tensorboard are installed."""
    missing = [name for name in ("torch", "tensorboard") if find_spec(name) is None]
    return f"no events for TensorBoard: run pip install {' '.join(missing)} to have them written" if missing else ""


def scalars(kind: str, line: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield (tag, value) of each number that TensorBoard shows from a log line. ``kind``: kind of the line, such as "step"."""
    if kind == "step":
        yield from ((tag, line[name]) for name, tag in TAGS.items() if line.get(name) is not None)
    elif kind == "evaluation":
        yield "held_out/loss", line["loss"]
        known = zip(line["ends"], line["by_position"], strict=True)
        yield from ((f"held_out/loss_up_to_position_{end}", x) for end, x in known if x is not None)
    elif kind == "passkey":
        yield f"passkey/found_in_{line['length']}_tokens", line["accuracy"]


class Events:
    """A new file of events, one for each start of a run. ``begin``: the step to resume, or 0.
    Readers drop the events of earlier files after step ``begin``. Without torch or tensorboard nothing is written."""

    def __init__(self, out: Path, begin: int) -> None:
        self._folder, self._begin = out / FOLDER, begin
        self._missing = bool(explain_missing())

    @cached_property
    def _writer(self) -> Any:
        """The writer, made for the first number: in JAX its import of torch takes seconds, and the first step is awaited."""
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self._folder), purge_step=self._begin + 1)

    def __call__(self, kind: str, line: dict[str, Any]) -> None:
        """Write the numbers of a log line that TensorBoard shows, to the disk, because a kill may follow."""
        if not self._missing and (numbers := list(scalars(kind, line))):
            for tag, value in numbers:
                self._writer.add_scalar(tag, value, line["step"])
            self._writer.flush()
