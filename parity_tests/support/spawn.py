"""A pool of processes that run functions of tests: started once, reused, one thread each, on gloo by default.

They are forked from a server that has imported PyTorch, so they start in hundredths of a second and share its memory. A pool with
its own environment spawns them if the server has imported transformers, and so Triton, which has read its variables then.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import re
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from . import warm

MOST = 8
TIMEOUT = timedelta(seconds=180)
"""The timeout of every group in the pool: long, because a busy machine is slow, and meant to end hangs only.

A test that waits for a timeout sets its own.
"""


PATIENCE = 600
"""Seconds that the pool waits for a rank before it ends all of them."""


groups: dict[int, Any] = {}
"""In a process of the pool: the process group of the first n processes, by n; NON_GROUP_MEMBER if it is not one of them."""


class Ranks:
    """A pool of processes.

    ``ranks(n, function, *arguments)`` runs ``function(group, *arguments)`` on the first n processes and returns n results.
    ``function`` must be importable (a module-level function of a test file); ``group`` is the process group of those n. An
    argument of type PerRank is unpacked: each rank gets its own. An exception on a rank is raised here, with its traceback as a
    note; ``ranks.outcomes`` returns exceptions instead. ``environment``: variables that the processes set first. ``needed``: what
    their server imports, if it starts with them.
    """

    def __init__(
        self, backend: str = "gloo", most: int = MOST, environment: dict[str, str] | None = None, needed: tuple[str, ...] = ()
    ) -> None:
        self._backend, self._most, self._environment, self._needed = backend, most, environment or {}, needed
        self._processes: list[tuple[multiprocessing.Process, multiprocessing.connection.Connection]] = []

    def __call__(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        outcomes = self.outcomes(ranks, function, *arguments)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes

    def outcomes(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        self._start()
        for rank, (_, pipe) in enumerate(self._processes[:ranks]):
            mine = [a.of(rank) if isinstance(a, PerRank) else a for a in arguments]
            pipe.send((ranks, function, mine))
        return [self._receive(rank) for rank in range(ranks)]

    def refuse(self, message: str, ranks: int, function: Callable[..., Any], *arguments: Any) -> None:
        """Assert that all ranks raise the same ValueError, in which the regular expression ``message`` is found."""
        errors = self.outcomes(ranks, function, *arguments)
        assert len({*map(str, errors)}) == 1 and isinstance(errors[0], ValueError), errors
        assert re.search(message, str(errors[0])), errors[0]

    def _receive(self, rank: int) -> Any:
        process, pipe = self._processes[rank]
        if pipe.poll(PATIENCE) and process.is_alive():
            return pipe.recv()
        self.close()
        raise TimeoutError(f"rank {rank} died or gave no answer within {PATIENCE} s; the next call starts a new pool")

    def _start(self) -> None:
        if self._processes:
            return
        late = self._environment and warm.HUGGING_FACE in warm.preloaded
        context = multiprocessing.get_context("spawn") if late else warm.context("torch", *self._needed)
        self._folder = tempfile.TemporaryDirectory(prefix="ring-attn-")
        store = os.path.join(self._folder.name, "store")
        for rank in range(self._most):
            ours, theirs = context.Pipe()
            arguments = rank, self._most, self._backend, self._environment, store, theirs
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append((process, ours))  # type: ignore[arg-type]

    def close(self) -> None:
        for process, pipe in self._processes:
            pipe.close()
            process.terminate()
            process.join()
        if self._processes:
            self._folder.cleanup()
        self._processes = []


class PerRank:
    """An argument with a value for each rank."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def of(self, rank: int) -> Any:
        return self.values[rank]


def _serve(
    rank: int, most: int, backend: str, environment: dict[str, str], store: str, pipe: multiprocessing.connection.Connection
) -> None:
    os.environ.update(environment)
    import torch
    import torch.distributed as dist

    from ring_attn_torch.ring import agreement

    agreement.GRACE = TIMEOUT  # on a busy machine a rank may come over 5 s late, and the others would raise another message
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=most, timeout=TIMEOUT)
    groups.update({n: dist.new_group(range(n), timeout=TIMEOUT) for n in range(1, most)})
    groups[most] = dist.group.WORLD
    warm.collect_rarely()
    warm.hash_apart(rank)
    while True:
        try:
            ranks, function, arguments = pipe.recv()
        except EOFError:
            return
        if known := agreement._histories.get(groups[ranks]):
            known.agreed.clear()  # so that the ranks compare in every test, whichever ran before
        try:
            result = function(groups[ranks], *arguments)
        except BaseException as error:
            result = _sendable(error)
            result.add_note(f"on rank {rank}:\n{traceback.format_exc()}")
        pipe.send(result)


def _sendable(error: BaseException) -> BaseException:
    """Return ``error``, or its text in an AssertionError if it cannot be pickled, such as the Failed of ``pytest.raises``."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return AssertionError(f"{type(error).__name__}: {error}")
    return error
