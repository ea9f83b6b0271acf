"""The decode loop: each step, a CUDA graph on GPUs, caches each unfinished request's newest token and draws its next token."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn_core.model.generation import Generation

from ..ring.groups import ranks_of
from .cache import KVCache
from .forward import Decoder, decode_step, logits_of
from .merge import sum_over_ranks
from .sampling import draw, on_device

Read = Callable[[], list[int]]


class DecodeLoop:
    """The decode loop of ``generate``. On CUDA the first step runs eagerly, since it compiles and connects; the second is
    captured. Rank 0 broadcasts its tokens, since ranks that round differently could draw others."""

    def __init__(self, model: Decoder, cache: KVCache, generation: Generation) -> None:
        self._model, self._cache, device = model, cache, cache.counts.device
        self._parameters = on_device(generation.sampling.parameters, device)
        self.tokens = torch.zeros(cache.spec.batch, dtype=torch.int64, device=device)
        self.finished = torch.zeros(cache.spec.batch, dtype=torch.bool, device=device)
        self._requests = torch.arange(cache.spec.batch, device=device)
        self._stop = torch.tensor(generation.stop, dtype=torch.int64, device=device)
        self._ends = torch.tensor(generation.ends, dtype=torch.int32, device=device)
        self._new = generation.new
        self.ahead = device.type == "cuda"
        """True (on CUDA) if the next step is launched before the host reads the newest tokens, so that step and read overlap."""
        self._steps = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._side = torch.cuda.Stream(device) if self.ahead else None
        self._sent: list[Tensor] = []

    def begin(self, hidden: Tensor) -> None:
        """Draw the first new tokens from the prompts' last hidden states [requests, dim], each nonzero on at most one rank."""
        self._take(logits_of(self._model, sum_over_ranks(hidden, self._cache.ring)))

    def step(self) -> None:
        """Append the newest token of each unfinished request to the cache, and draw each request's next token."""
        if not self.ahead:
            self._compute()
        elif self._graph is None:
            self._begin_graph()
        else:
            self._replay(self._graph)
        self._steps += 1

    def read(self) -> Read:
        """Return a function that returns the newest tokens. On CUDA ``read`` starts a copy to one of two host buffers: call the
        function within two steps. On a CPU nothing is copied: call it before the next step, which overwrites the tokens."""
        if not self.ahead:
            return self.tokens.tolist
        if not self._sent:
            self._sent = [torch.empty(len(self.tokens), dtype=torch.int64, device="cpu", pin_memory=True) for _ in range(2)]
        host, there = self._sent[self._steps % 2], torch.cuda.Event()
        host.copy_(self.tokens, non_blocking=True)
        there.record()

        def read() -> list[int]:
            there.synchronize()
            return host.tolist()

        return read

    def _begin_graph(self) -> None:
        """Run the first step eagerly on a side stream, as torch.cuda.graph requires; capture the second there, and replay it. The
        default capture stream is on the GPU of the process's first capture, so on another GPU it would capture nothing."""
        side = self._side
        assert side is not None, "only on CUDA"
        if self._steps == 0:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._compute()
            torch.cuda.current_stream().wait_stream(side)
            return
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=side):
            self._compute()
        self._replay(self._graph)

    def _replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Replay the step, and count a token of each request below its limit; to read stop ids, the host would wait."""
        more = [int(self._steps + 1 < new) for new in self._new]
        self._cache.check_room(more)
        graph.replay()
        self._cache.replayed(more)

    def _compute(self) -> None:
        logits, _ = decode_step(self._model, self.tokens[:, None], self._cache, valid=~self.finished[:, None])
        self._take(logits[:, 0])

    def _take(self, logits: Tensor) -> None:
        new = draw(logits, self._parameters, self._requests, self._cache.lengths)
        if ranks_of(self._cache.ring) > 1:
            dist.broadcast(new, group=self._cache.ring, group_src=0)
        self.tokens.copy_(new)
        self.finished |= (new[:, None] == self._stop).any(1) | (self._cache.lengths >= self._ends)
