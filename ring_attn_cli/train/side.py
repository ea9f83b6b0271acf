"""What a framework does for a run; everything else of the run is in ``loop.py``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from ring_attn_core.model.config import TransformerConfig
    from ring_attn_core.model.progress import Progress


class Step(NamedTuple):
    loss: float
    """The mean over all labels of the step, in nats."""
    norm: float
    """Of all gradients together, before clipping."""


class Machine(NamedTuple):
    """What computes: the name of a device, how many there are, and the bytes that one of them held at most, so far."""

    device: str
    devices: int
    memory: int


class Side(Protocol):
    """A model, its optimizer and its data on the ranks of this process; every method is called on all ranks alike.

    A microbatch is a Shard of the framework. ``first``: whether this process speaks for all.
    """

    first: bool
    config: TransformerConfig
    parameters: int
    data: Any
    """The training's ``SequenceShardedDataset``."""
    held_out: Any

    def resume(self) -> Progress | None: ...

    def save(self, step: int, data: str) -> None: ...

    def finish(self) -> None:
        """Wait for the checkpoint under way, and save the weights."""
        ...

    def shard(self, ids: list[list[int]], labels: list[list[int]]) -> Any:
        """The microbatch of whole rows, each one document."""
        ...

    def step(self, number: int, microbatches: list[Any]) -> Step:
        """One step of the optimizer; ``number`` counts from 0."""
        ...

    def losses(self, microbatch: Any, ends: list[int]) -> Iterable[tuple[float, int]]:
        """Sum of the losses and number of labels, of each bucket of tokens by how many of their document come before them."""
        ...

    def wrong(self, microbatch: Any) -> list[int]:
        """Of every row how many labels are not the most probable token."""
        ...

    def machine(self) -> Machine: ...
