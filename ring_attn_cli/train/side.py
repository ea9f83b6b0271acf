"""The interface of a framework to the training loop in ``loop.py``."""

from __future__ import annotations

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
    """The devices of a run: name of one, their number, and the peak memory of one so far, in bytes."""

    device: str
    devices: int
    memory: int


class Side(Protocol):
    """A model, its optimizer and its data on the ranks of this process; each method is called on all ranks alike.

    A microbatch is a Shard of the framework. ``first``: True in the process that writes the log.
    """

    first: bool
    config: TransformerConfig
    parameters: int
    """Number of all weights."""
    trained: int
    """Number of the weights that the optimizer updates; with LoRA, those of the adapters."""
    data: Any
    """The ``SequenceShardedDataset`` of the training."""
    held_out: Any

    def resume(self) -> ResumePoint | None: ...

    def save(self, step: int, data: str) -> None: ...

    def finish(self) -> None:
        """Wait for the checkpoint in progress and save the weights; with LoRA, save and merge the adapters before that."""
        ...

    def shard(self, ids: list[list[int]], labels: list[list[int]]) -> Any:
        """Convert ``ids`` and ``labels`` of global rows, each row one document, to a microbatch."""
        ...

    def step(self, number: int, microbatches: list[Any]) -> TrainStep:
        """Run one optimizer step; ``number`` counts from 0."""
        ...

    def losses(self, microbatch: Any, ends: list[int]) -> Iterable[tuple[float, int]]:
        """Return the sum of the losses and the number of labels of each bucket.

        A token's bucket depends on the number of tokens before it in its document; ``ends`` are the buckets' exclusive ends.
        """
        ...

    def wrong(self, microbatch: Any) -> list[int]:
        """Return for each row the number of labels that differ from the most probable token."""
        ...

    def machine(self) -> RunDevices: ...
