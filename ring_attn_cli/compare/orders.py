"""What the sides are told and what they answer: an order names a call and a case; arrays travel as numpy shards."""

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

from .cases import Arrays, Case


@dataclass(frozen=True)
class Order:
    """``kind``: "prepare" and run once, or "time", "memory" or "forget" what was prepared. ``call``, ``oracle``, ``user``: as in
    a Variant."""

    kind: str
    call: str
    case: Case
    ranks: int
    oracle: str
    user: str | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """What is prepared: the order but for its kind."""
        return self.call, self.case, self.ranks, self.user


@dataclass(frozen=True)
class Outcome:
    """What a run gave: every array as shards in the order of ranks, of the ranks that answer; ``cotangents``: those that the
    gradients follow from."""

    shards: dict[str, list[np.ndarray]]
    cotangents: frozenset[str]


@dataclass(frozen=True)
class Settings:
    """What every process of a side is started with. ``rings``: the sizes of rings that there will be."""

    rings: tuple[int, ...]
    device: str
    patience: float
    store: str
    folder: str

    @property
    def most(self) -> int:
        return max(self.rings)


def resolve(call: str) -> Callable[..., Any]:
    """The function that ``module:function`` names."""
    module, _, function = call.partition(":")
    return getattr(importlib.import_module(module), function)


def serve(report: Callable[[str, Any], None], rank: int, orders: Any, side: Any, patience: float) -> None:
    """Answer orders until the pipe closes: "done" with what ``side`` answers, or "mistake" with what an exception says.

    Shortly before the one who gave an order loses ``patience``, this process prints where it is, for :func:`where_at`.
    """
    while True:
        try:
            order = orders.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(0.8 * patience, file=2)  # the log; sys.stderr may be anything
        try:
            answer = getattr(side, order.kind)(order)
        except Exception as error:
            report("mistake", (rank, in_words(error)))
        else:
            report("done", (rank, answer))
        finally:
            faulthandler.cancel_dump_traceback_later()


def where_at(log: str) -> str | None:
    """Where the main thread of a process was that :func:`serve` has let print it: "file.py, line 3 in function"."""
    *_, dump = log.rpartition("Timeout (")
    threads = dump.split("most recent call first):")  # the main thread comes last
    found = re.search(r'File "(.*)", line (\d+) in (\S+)', threads[-1]) if len(threads) > 1 else None
    return f"{Path(found[1]).name}, line {found[2]} in {found[3]}" if found else None


def in_words(error: BaseException) -> str:
    """A ValueError in its own words; of anything else the type, and the first line, for JAX writes pages."""
    text = str(error).strip() or "without a word"
    return text if type(error) is ValueError else f"{type(error).__name__}: {text.partition(chr(10))[0]}"


def importable(folder: str) -> None:
    """Let modules of this folder be imported. It comes last, so that a file random.py or torch.py in it stands in for nothing."""
    if folder not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()


def here() -> str:
    return str(Path.cwd())


def cut(x: np.ndarray, plan: RingPlan, pad: Any = 0) -> list[np.ndarray]:
    """Every rank's shard of a whole array [batch, tokens, ...], padding filled with ``pad``."""
    missing = (x.shape[0], plan.seq_local * plan.ranks - x.shape[1], *x.shape[2:])
    padded = np.concatenate([x, np.full(missing, pad, x.dtype)], 1)
    return [np.ascontiguousarray(padded[:, list(plan.positions(rank))]) for rank in range(plan.ranks)]


def joined(outcome: Mapping[str, list[np.ndarray]], sharded: frozenset[str], plan: RingPlan) -> Arrays:
    """Whole arrays in natural order without padding: shards side by side, parts of a gradient summed, and of what every rank
    has the first."""
    order = np.argsort([position for rank in range(plan.ranks) for position in plan.positions(rank)])[: plan.length]
    whole = {}
    for name, shards in outcome.items():
        if name in sharded:
            whole[name] = np.concatenate(shards, 1)[:, order]
        else:
            whole[name] = np.sum(shards, 0) if name.startswith("d") else shards[0]
    return whole
