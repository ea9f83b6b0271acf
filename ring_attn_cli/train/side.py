"""The interface that PyTorch and JAX implement for the training loop in ``loop.py``."""

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
    """The devices of a run: name of one, their number, and the peak memory of one so far, in bytes.

    On CPUs the memory is that of this process, as the system counts it.
    """

    device: str
    devices: int
    memory: int


class Side(Protocol):
    """The model, optimizer and data of this process, in one framework. All processes of a run call each method alike.

    A microbatch is what ``data`` yields, a Shard of the framework. ``first``: True in the process that writes the log.
    """

    first: bool
    config: TransformerConfig
    parameters: int
    """Number of all weights."""
    trained: int
    """Number of the weights that the optimizer updates; with LoRA, those of the adapters."""
    data: Any
    """The ``SequenceShardedDataset`` of the training data; ``held_out`` is that of the held-out files."""
    held_out: Any

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
        """Return (sum of the losses, number of labels) of each bucket, over all ranks.

        A token's bucket depends on the number of tokens before it in its document; ``ends`` are the buckets' exclusive ends.
        """
        ...

    def wrong(self, microbatch: Any) -> list[int]:
        """Return for each global row of a microbatch the number of labels that differ from the most probable token."""
        ...

    def machine(self) -> RunDevices: ...
