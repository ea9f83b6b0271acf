"""A stand-in for the memory of GPUs that ranks share: a file mapped by all gloo processes of a ring on a CPU.

The stand-in does at once, in the order of the host's calls, what a GPU does in the order of its streams. A flag is awaited by the
host. So a wait that no rank ends is an error here, and would be a GPU that waits for ever.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from ring_attn_core.problem import problem
from ring_attn_torch.ring import peers
from ring_attn_torch.ring.agreement import exchange

PATIENCE = 60.0


class Mapped(peers.Peers):
    """Buffers in one file, which each rank maps whole."""

    def allocate(self, group: dist.ProcessGroup, size: int) -> None:
        name = None
        if self.rank == 0:
            file, name = tempfile.mkstemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
            os.truncate(file, size * self.ranks)
            os.close(file)
        name = exchange("the name of a file", name, group)[0]
        self._whole = torch.from_numpy(np.memmap(name, np.uint8, "r+", shape=(self.ranks, size)))
        self._whole[self.rank, peers.FLAG_BYTES :] = 255  # NaN in every dtype
        exchange("the file is mapped", None, group)
        if self.rank == 0:
            os.unlink(name)

    def bytes_of(self, rank: int, begin: int, count: int) -> torch.Tensor:
        return self._whole[rank, begin : begin + count]

    def raise_flag(self, rank: int, kind: int, of: int, value: int, side: bool = False) -> None:
        self._flags(rank)[self._flag(kind, of)] = value

    def await_flag(self, kind: int, of: int, value: int, side: bool = False) -> None:
        began, flags, index = time.monotonic(), self._flags(self.rank), self._flag(kind, of)
        while flags[index] < value:
            if time.monotonic() - began > PATIENCE:
                raise RuntimeError(f"rank {self.rank} waited {PATIENCE} s for flag {kind} of {of}")
            time.sleep(0)

    def _flags(self, rank: int) -> Any:
        return self.bytes_of(rank, 0, peers.FLAG_BYTES).view(torch.int32).numpy()

    def on_side(self) -> Any:
        return nullcontext()

    def keep_alive(self, x: torch.Tensor) -> None: ...

    def await_end(self) -> None: ...

    def end(self, what: str) -> None:
        self.running = False


@contextmanager
def mapped() -> Iterator[None]:
    """Let "push" run on CPUs, over files, inside the ``with``."""
    with patch.dict(peers.MAKERS, {"cpu": Mapped}), patch.object(problem, "check_device", lambda *_: None):
        yield
