"""The interface that PyTorch and JAX implement for the training loop in ``loop.py``."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from ring_attn_core.model.config import TransformerConfig
    from ring_attn_core.model.progress import ResumePoint


class TrainStep(NamedTuple):
    loss: float
    """Mean over all labels of the step, in nats."""
    norm: float
    """Global norm of the gradients before clipping."""


class RunDevices(NamedTuple):
    """The devices of a run: the name of one, their number, and one's peak memory so far, in bytes."""

    device: str
    devices: int
    memory: int


def measure_process() -> int:
    """Return the peak memory of this process in bytes, for devices without memory statistics, such as CPUs."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Trainer(Protocol):
    """The model, optimizer and data of this process, in one framework; all processes call each method together.
    ``data`` yields microbatches, each a ``Shard``. ``first``: True in the process that writes the log."""

    first: bool
    model_config: TransformerConfig
    parameters: int
    """Number of all weights."""
    trained: int
    """Number of the weights that the optimizer updates; with LoRA, those of the adapters."""
    data: Any
    """The ``SequenceShardedDataset`` of the training data; ``held_out`` is that of the held-out files."""
    held_out: Any

    def open(self) -> None:
        """Open the data and the folder of checkpoints, which a step alone does not need."""
        ...

    def resume(self) -> ResumePoint | None: ...

    def save(self, step: int, data: str) -> None: ...

    def finish(self) -> None:
        """Wait for the checkpoint in progress and save the weights; with LoRA, first save and merge the adapters."""
        ...

    def shard(self, ids: list[list[int]], labels: list[list[int]]) -> Any:
        """Return the microbatch of the global rows ``ids`` and ``labels``; each row is one document."""
        ...

    def step(self, number: int, microbatches: list[Any]) -> TrainStep:
        """Run one optimizer step; ``number`` counts from 0."""
        ...

    def losses(self, microbatch: Any, ends: list[int]) -> Iterable[tuple[float, int]]:
        """Return (sum of the losses, number of labels) of each bucket of positions, over all ranks.
        A token is in the first bucket whose exclusive end in ``ends`` exceeds the number of tokens before it in its document."""
        ...

    def wrong(self, microbatch: Any) -> list[int]:
        """Count the wrong predictions in each global row: labels that are not the model's most probable token."""
        ...

    def machine(self) -> RunDevices: ...
