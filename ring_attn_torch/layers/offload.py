"""Offloading of tensors to host memory between forward and backward.

The copy of a tensor to the host starts when its block saves it. The device tensor is released as soon as three newer tensors have
been saved; its memory is reused only after the copy. A block that attends once saves three tensors: its input, out and lse. So
the tensors of a block are released during the forward of the next block. The tensors of block i are copied back during the
backward of block i + 1. On CUDA the host memory is pinned, and the copies run on a side stream. Other devices use no side stream.

    forward     block 0      block 1      block 2            backward    block 2      block 1      block 0
    copies      0 -> host    1 -> host    2 -> host                      1 -> device  0 -> device
    releases                 0            1

The last block's tensors are still on the device when its backward begins, so it uses them without a copy back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from .recompute import Fetch, Function, contexts

PIECE = 2**26
"""Maximum bytes of a pinned allocation; larger tensors are split.

torch rounds each allocation up to a power of two. For an unsplit tensor this could double the memory.
"""

ON_THEIR_WAY = 3
"""Maximum number of tensors that stay on the device while they are copied: a block's input, out and lse."""


@torch.compiler.disable(reason='activations="offload" copies on a stream of its own, which torch.compile does not follow')
def offload(host: OffloadedTensors, function: Function, x: Tensor, *shared: object) -> Tensor:
    """Return ``function(x, *shared)``. Offload x and attention's (out, lse) to the host; keep ``shared`` on the device."""
    host.begin()
    place, shape = x.data_ptr(), x.shape

    def pack(tensor: Tensor) -> Tensor | Fetch:
        return host.put(tensor) if tensor.shape == shape and tensor.data_ptr() == place else tensor

    def unpack(packed: Tensor | Fetch) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed()

    with saved_tensors_hooks(pack, unpack):  # for the inputs: inside, checkpoint sets its own hooks
        return checkpoint(function, x, *shared, use_reentrant=False, context_fn=partial(contexts, host.put))


class OffloadedTensors:
    def __init__(self) -> None:
        self._block: OffloadedBlock | None = None
        self._leaving: deque[Page] = deque()

    def begin(self) -> None:
        self._block = OffloadedBlock(self._block)

    def put(self, x: Tensor) -> Page:
        """Start to copy ``x`` to the host, and return its ``Page``. ``x`` must not be modified afterwards."""
        assert self._block is not None
        page = Page(x.detach().contiguous(), self._block)
        self._leaving.append(page)
        if len(self._leaving) > ON_THEIR_WAY:
            self._leaving.popleft().leave()
        return page


class OffloadedBlock:
    """The pages of a block, held weakly, since the autograd graph keeps those it needs, and the preceding block."""

    def __init__(self, before: OffloadedBlock | None) -> None:
        self.before = before
        self.pages: WeakSet[Page] = WeakSet()

    def fetch(self) -> None:
        for page in list(self.pages):
            page.fetch()


class Page:
    """A tensor with a copy in host memory. ``leave`` drops the device tensor; ``fetch`` makes a new one from the copy."""

    def __init__(self, x: Tensor, block: OffloadedBlock) -> None:
        self._block, self._shape = block, x.shape
        block.pages.add(self)
        self._pieces = [torch.empty_like(piece, device="cpu", pin_memory=x.is_cuda) for piece in _pieces(x)]
        self._copy(x, self._pieces, _pieces(x))

    def _copy(self, x: Tensor, to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
        self._here: Tensor | None = x
        with _beside(x.device) as (self._stream, side):
            for a, b in zip(to, source, strict=True):
                a.copy_(b, non_blocking=True)
            self._copied = None if side is None else side.record_event()

    def fetch(self) -> None:
        if self._here is None:
            x = torch.empty(self._shape, dtype=self._pieces[0].dtype, device=self._device)
            self._copy(x, _pieces(x), self._pieces)

    def leave(self) -> None:
        """Let the tensor's stream wait for the copy, so that nothing overwrites the memory too early. Drop the device tensor."""
        self._settle()
        if self._here is not None:
            self._device, self._here = self._here.device, None

    def __call__(self) -> Tensor:
        """Return the tensor on its device, and start to copy back the preceding block's pages, which the backward needs next."""
        self.fetch()
        x = self._here
        assert x is not None
        self.leave()
        if self._block.before is not None:
            self._block.before.fetch()
        return x

    def _settle(self) -> None:
        """Make ``_stream``, which was current when the copy began, wait for the end of the copy."""
        if self._copied is not None and self._stream is not None:
            self._stream.wait_event(self._copied)
        self._copied = None

    def __del__(self) -> None:
        self._settle()


def _pieces(x: Tensor) -> tuple[Tensor, ...]:
    return x.view(-1).split(PIECE // x.element_size())


@contextmanager
def _beside(device: torch.device) -> Iterator[tuple[torch.cuda.Stream | None, torch.cuda.Stream | None]]:
    """Enter a side stream for copies; it waits for the current stream. Yield (current, side), or (None, None) without CUDA."""
    if device.type != "cuda":
        yield None, None
        return
    current, side = torch.cuda.current_stream(device), _side(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield current, side


@lru_cache
def _side(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
