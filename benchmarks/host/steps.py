"""The host time of a ring's steps in our own Python: transfers that send nothing, and a backend that computes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn_core import causal
from ring_attn_core.problem import problem as of_call
from ring_attn_core.problem.options import Options
from ring_attn_torch.attend.state import BackwardInputs, Gradients, State
from ring_attn_torch.call.decide import compile_call
from ring_attn_torch.call.prepare import Arrays, problem_of
from ring_attn_torch.ring import collectives, loop, peers

from ..support.process import answer, run_fresh
from .timing import microseconds

RANKS, FEW = 8, 2
TOKENS, HEADS, HEAD_DIM = 16, 8, 8  # small: the sums of gradients that arrive are not what is measured
STRATEGIES = "ring", "two_way", "direct", "gather", "ulysses", "push"


class Idle:
    """A backend that returns arrays made beforehand. It takes the gradients that arrive, as every backend does."""

    two_arrays = True

    def __init__(self, state: State, of_q: BackwardInputs, dkv: Tensor) -> None:
        self.state, self.of_q, self.dkv = state, of_q, dkv

    def attend(self, *_: Any, last: bool) -> State:
        return self.state

    def backward_inputs(self, *_: Any) -> BackwardInputs:
        return self.of_q

    def attend_backward(self, of_q: BackwardInputs, *_: Any, last: bool) -> tuple[Tensor, Gradients]:
        arrived = _[-1]  # the last positional argument
        arrived()
        return of_q.q, self.dkv


class Sent:
    """A pending transfer that is over at once."""

    def wait(self) -> None:
        """Return at once."""


class Unshared(peers.Peers):
    """Buffers of which each rank has its own only. Flags and streams, which exist on GPUs only, are left out."""

    def allocate(self, group: Any, size: int) -> None:
        self._own = torch.empty(size, dtype=torch.uint8)

    def bytes_of(self, rank: int, begin: int, count: int) -> Tensor:
        return self._own[begin : begin + count]

    def raise_flag(self, rank: int, kind: int, of: int, value: int, side: bool = False) -> None: ...

    def await_flag(self, kind: int, of: int, value: int, side: bool = False) -> None: ...

    def on_side(self) -> Any:
        return nullcontext()

    def keep_alive(self, x: Tensor) -> None: ...

    def await_end(self) -> None: ...

    def end(self, what: str) -> None:
        self.running = False


@contextmanager
def silent_transport() -> Iterator[None]:
    """Replace torch.distributed's batched sends and receives, its collectives and shared memory by ones that send nothing."""
    works = [Sent()]
    with (
        patch.dict(peers.MAKERS, {"cpu": Unshared}),
        patch.object(peers, "exchange", lambda *_: []),
        patch.object(dist, "batch_isend_irecv", lambda operations: works),
        patch.object(collectives, "all_gather_single", lambda *_, **__: works[0]),
        patch.object(dist, "all_to_all_single", lambda *_, **__: works[0]),
    ):
        yield


def steps() -> list[dict[str, Any]]:
    """Return CPU microseconds by strategy, of a pass on RANKS ranks and of one step of it, from a fresh process.

    A step is the difference between passes on RANKS and on FEW ranks. It contains torch's objects for the transfers (P2POps).
    """
    return run_fresh(__name__, {})[0]


def rows_of() -> list[dict[str, Any]]:
    """Return the rows of ``steps``, measured in this process as one rank of a fake process group of RANKS ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake"

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    groups = {RANKS: dist.group.WORLD, FEW: dist.new_group(list(range(FEW)))}
    q = torch.randn(1, TOKENS, HEADS, HEAD_DIM)
    arrays = [torch.randn(1, TOKENS, HEADS, 2 * HEAD_DIM)] * 2
    operations = lambda: [dist.P2POp(call, x, group=groups[RANKS], group_peer=1) for call, x in zip(_CALLS, arrays, strict=True)]
    works: dict[str, Callable[[], Any]] = {"operations": operations}
    for strategy in STRATEGIES:
        for ranks, group in groups.items():
            for name, work in _passes(strategy, ranks, group, q).items():
                works[f"{strategy}, {name}, {ranks}"] = work
    with silent_transport(), torch.no_grad():
        times = microseconds(works, clock=time.thread_time)  # the time of other processes is left out
    bare = {"forward": times["operations"], "backward": 2 * times["operations"]}
    rows = []
    for strategy in STRATEGIES:
        for name in bare:
            of_many, of_few = (times[f"{strategy}, {name}, {ranks}"] for ranks in (RANKS, FEW))
            row = {"strategy": strategy, "pass": name, f"a pass on {RANKS}": of_many}
            steps = {"a step": (of_many - of_few) / (RANKS - FEW), "torch's P2POps": bare[name]}
            rows.append(row | (steps if strategy == "ring" else {}))
    return [{key: round(x, 1) if isinstance(x, float) else x for key, x in row.items()} for row in rows]


_CALLS: Sequence[Any] = (dist.isend, dist.irecv)


def _passes(strategy: str, ranks: int, group: Any, q: Tensor) -> dict[str, Callable[[], Any]]:
    options = Options(mask=causal(), strategy=strategy)
    with patch.object(of_call, "check_device", lambda *_: None):  # "push" is of GPUs
        decision = compile_call(problem_of(q, q, q, Arrays(), ranks, options), any_position=False)
    keys, score, ring = decision.pack_keys(q, q, Arrays()), decision.score_with(Arrays()), decision.ring(group)
    lse = q[..., 0].clone()
    state = State(q, lse, lse)
    backend: Any = Idle(state, BackwardInputs(q, q, lse, lse), torch.zeros_like(keys.kv))
    return {
        "forward": lambda: loop.forward(q, keys, score, ring, backend),
        "backward": lambda: loop.backward(q, keys, state, State(q, lse), score, ring, backend),
    }


if __name__ == "__main__":
    answer(rows_of())
