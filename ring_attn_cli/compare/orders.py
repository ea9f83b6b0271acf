"""Messages between the pool and a framework's processes: an order requests an action, and an outcome returns NumPy arrays."""

from __future__ import annotations

import faulthandler
import importlib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ring_attn_core.plan.ring import RingPlan

from ..processes import Parent
from .cases import Arrays, Case


@dataclass(frozen=True)
class Order:
    """A request to the processes of a framework.
    ``kind``: "prepare" builds the ``call`` (``module:function``) and runs it once; "time", "memory" and "forget" act on it.
    ``user``: a user's own ``module:function``. ``oracle``: the key in ``ORACLES`` for the inputs."""

    kind: str
    call: str
    case: Case
    ranks: int
    oracle: str
    user: str | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """Return the key under which the prepared call is stored: the order without ``kind`` and ``oracle``."""
        return self.call, self.case, self.ranks, self.user


@dataclass(frozen=True)
class Outcome:
    """The results and gradients of a run.
    ``shards``: arrays by rank, or one array if replicated or summed. ``cotangents``: names of the cotangents that the gradients
    were computed from."""

    shards: dict[str, list[np.ndarray]]
    cotangents: frozenset[str]


@dataclass(frozen=True)
class WorkerSettings:
    """The settings that each process receives at its start.
    ``rings``: all ring sizes. ``patience``: seconds. ``store``: file by which PyTorch's ranks meet. ``folder``: from which a
    user's function is imported."""

    rings: tuple[int, ...]
    device: str
    patience: float
    store: str
    folder: str

    @property
    def most(self) -> int:
        return max(self.rings)


def resolve(call: str) -> Callable[..., Any]:
    """Import and return the function that ``module:function`` names."""
    module, _, function = call.partition(":")
    return getattr(importlib.import_module(module), function)


def serve(parent: Parent, rank: int, side: Any, patience: float) -> None:
    """Execute each order by the method of ``side`` that ``Order.kind`` names, until the pipe closes.
    Report "done" with (rank, result) or "mistake" with (rank, words). After ``0.8 * patience`` seconds in one order, print a
    traceback to the log for :func:`where_at`."""
    while True:
        try:
            order = parent.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(0.8 * patience, file=2)  # the log; sys.stderr may be replaced
        try:
            answer = getattr(side, order.kind)(order)
        except Exception as error:
            parent("mistake", (rank, in_words(error)))
        else:
            parent("done", (rank, answer))
        finally:
            faulthandler.cancel_dump_traceback_later()


def where_at(log: str) -> str | None:
    """Return the main thread's line of code, such as "file.py, line 3 in function", from the log that :func:`serve` wrote."""
    *_, dump = log.rpartition("Timeout (")
    threads = dump.split("most recent call first):")  # the main thread comes last
    found = re.search(r'File "(.*)", line (\d+) in (\S+)', threads[-1]) if len(threads) > 1 else None
    return f"{Path(found[1]).name}, line {found[2]} in {found[3]}" if found else None


OUT_OF_MEMORY = "RESOURCE_EXHAUSTED", "can't allocate memory", "CUDA out of memory"
"""Texts in the out-of-memory errors of JAX, PyTorch on a CPU, and PyTorch on a GPU; these errors are not MemoryErrors."""


def in_words(error: BaseException) -> str:
    """Return the message of a ValueError, else the type and first line; if memory ran out, also the options to lower."""
    text = str(error).strip() or "without a word"
    if isinstance(error, MemoryError) or any(sign in text for sign in OUT_OF_MEMORY):
        return f"there is not enough memory ({text.partition(chr(10))[0]}): lower --batch, --length, --heads or --head-dim"
    return text if type(error) is ValueError else f"{type(error).__name__}: {text.partition(chr(10))[0]}"


def importable(folder: str) -> None:
    """Append ``folder`` to the end of ``sys.path``, so that a file random.py or torch.py in the folder shadows nothing."""
    if folder not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()


def here() -> str:
    return str(Path.cwd())


def cut(x: np.ndarray, plan: RingPlan, pad: Any = 0) -> list[np.ndarray]:
    """Return one shard for each rank from a global array [batch, tokens, ...]; ``pad`` fills the padding."""
    missing = (x.shape[0], plan.seq_local * plan.ranks - x.shape[1], *x.shape[2:])
    padded = np.concatenate([x, np.full(missing, pad, x.dtype)], 1)
    return [np.ascontiguousarray(padded[:, list(plan.positions(rank))]) for rank in range(plan.ranks)]


def joined(outcome: Mapping[str, list[np.ndarray]], sharded: frozenset[str], plan: RingPlan) -> Arrays:
    """Return global arrays in natural order: shards concatenated, other gradients summed over ranks, other results of rank 0."""
    order = np.argsort([position for rank in range(plan.ranks) for position in plan.positions(rank)])[: plan.length]
    whole = {}
    for name, shards in outcome.items():
        if name in sharded:
            whole[name] = np.concatenate(shards, 1)[:, order]
        else:
            whole[name] = np.sum(shards, 0) if name.startswith("d") else shards[0]
    return whole
