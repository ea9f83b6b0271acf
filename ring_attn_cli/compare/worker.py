"""The part of a worker process that both frameworks share: it answers requests, and times prepared calls."""

from __future__ import annotations

import faulthandler
import importlib
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from ring_attn_core.plan.ring import RingPlan

from ..processes import Worker
from .cases import Case
from .messages import Change, Outcome, Request
from .oracles import ORACLES, GlobalArrays, Oracle

CAST = {"q", "k", "v", "x"}
"""Arrays that are cast to the case's dtype; all others, such as sinks and weights, keep the dtype that they are drawn in."""

Arrays = dict[str, Any]
Function = Callable[[Arrays], Arrays]


class Call(NamedTuple):
    """Inputs for building a variant's function, which maps a rank's arrays to its results, both by name.
    ``ring``: the argument of the ``library`` that names the ring, ``group`` or ``axis_name``. ``bind(module, arrays)`` gives a
    layer its weights, named as by ``to_numpy``, and returns it with the other arrays. ``make``: more arguments to make a layer.
    ``user``: a user's own function as ``module:function``, or None. ``device``: this rank's in PyTorch, None in JAX."""

    case: Case
    plan: RingPlan
    user: str | None
    library: ModuleType
    ring: dict[str, Any]
    bind: Callable[[Any, Arrays], tuple[Callable[..., Any], Arrays]]
    make: dict[str, Any]
    device: Any = None


Build = Callable[[Call], Function]

Loaded = tuple[Arrays, Arrays, Arrays]
"""The placed arrays of a call: those to differentiate, the others, and the cotangents."""


class Prepared(NamedTuple):
    """A prepared call. ``run`` runs it; ``outcome`` runs it with a change of its arrays, and fetches the results."""

    run: Callable[[], Any]
    outcome: Callable[[Change | None], Outcome]


class CallRunner:
    """The prepared calls of one process. A framework's subclass adds ``build``, and measures what it measures in its own way."""

    def __init__(self) -> None:
        self._prepared: dict[Any, Prepared] = {}

    def build(self, request: Request, oracle: Oracle, inputs: GlobalArrays) -> Prepared:
        raise NotImplementedError

    def prepare(self, request: Request) -> Outcome:
        oracle = ORACLES[request.oracle]
        self._prepared[request.key] = prepared = self.build(request, oracle, oracle.inputs(request.case))
        return prepared.outcome(None)

    def run(self, request: Request) -> None:
        self._prepared[request.key].run()

    def time(self, request: Request) -> float:
        self.meet(request)
        began = time.perf_counter()
        self.run(request)
        return time.perf_counter() - began

    def meet(self, request: Request) -> None:
        """Wait for the other ranks before a timed run."""

    def memory(self, request: Request) -> int | None:
        """Return the peak memory of one run above the memory held before, in bytes; None without ``/proc``."""
        try:
            Path("/proc/self/clear_refs").write_text("5")  # reset the peak: imports and inputs may have needed more
            before = _status("VmRSS")
        except (OSError, StopIteration):
            return None
        self.run(request)
        return max(_status("VmHWM") - before, 0)

    def repeat(self, request: Request) -> Outcome:
        return self._prepared[request.key].outcome(request.change)

    def forget(self, request: Request) -> None:
        self._prepared.pop(request.key, None)


def load(inputs: GlobalArrays, paddings: dict[str, Any], change: Change | None, place: Callable[..., Any]) -> Loaded:
    """Apply ``change``, and call ``place(name, array, padding)`` for each array; ``paddings``: those that are not 0."""
    drawn, starts = inputs.arrays, inputs.cotangents
    if change is not None:
        drawn, starts, paddings = change.apply(drawn), change.apply(starts), paddings | change.paddings
    arrays = {name: place(name, x, paddings.get(name, 0)) for name, x in drawn.items()}
    leaves = {name: arrays.pop(name) for name in inputs.leaves}
    return leaves, arrays, {name: place(name, x, 0) for name, x in starts.items()}


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def serve(worker: Worker, rank: int, runner: Any, patience: float) -> None:
    """Answer each request by the method of ``runner`` that ``Request.kind`` names, until the pipe closes.
    Report "done" with (rank, result) or "mistake" with (rank, words). After ``0.8 * patience`` seconds in one request, print a
    traceback to the log for :func:`find_line`."""
    while True:
        try:
            request = worker.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(0.8 * patience, file=2)  # the log; sys.stderr may be replaced
        try:
            answer = getattr(runner, request.kind)(request)
        except Exception as error:
            worker("mistake", (rank, describe(error)))
        else:
            worker("done", (rank, answer))
        finally:
            faulthandler.cancel_dump_traceback_later()


def find_line(log: str) -> str | None:
    """Return the main thread's line of code, such as "file.py, line 3 in function", from the log that :func:`serve` wrote."""
    *_, dump = log.rpartition("Timeout (")
    threads = dump.split("most recent call first):")  # the main thread comes last
    found = re.search(r'File "(.*)", line (\d+) in (\S+)', threads[-1]) if len(threads) > 1 else None
    return f"{Path(found[1]).name}, line {found[2]} in {found[3]}" if found else None


OUT_OF_MEMORY = "RESOURCE_EXHAUSTED", "can't allocate memory", "CUDA out of memory"
"""Texts in the out-of-memory errors of JAX, PyTorch on a CPU, and PyTorch on a GPU; these errors are not MemoryErrors."""


def describe(error: BaseException) -> str:
    """Return the message of a ValueError, else the type and first line; if memory ran out, also the options to lower."""
    text = str(error).strip() or "without a word"
    if isinstance(error, MemoryError) or any(sign in text for sign in OUT_OF_MEMORY):
        return f"there is not enough memory ({text.partition(chr(10))[0]}): lower --batch, --length, --heads or --head-dim"
    return text if type(error) is ValueError else f"{type(error).__name__}: {text.partition(chr(10))[0]}"


def make_importable(folder: str) -> None:
    """Append ``folder`` to the end of ``sys.path``, so that a file random.py or torch.py in the folder shadows nothing."""
    if folder not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()
