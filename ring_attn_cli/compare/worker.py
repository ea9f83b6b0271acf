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
from .oracles import GlobalArrays

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

    def build(self, call: str) -> Function:
        """Return the function of this call that ``call``, a ``module:function``, builds."""
        module, _, function = call.partition(":")
        return getattr(importlib.import_module(module), function)(self)


class CallRunner:
    """The prepared calls of one process. A framework's subclass adds ``prepare``, which builds and runs a call."""

    def __init__(self) -> None:
        self._known: dict[Any, Callable[..., Any]] = {}
        self._outcomes: dict[Any, Callable[[Change | None], Outcome]] = {}

    def time(self, request: Request) -> float:
        self.meet(request)
        began = time.perf_counter()
        self._known[request.key]()
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
        self._known[request.key]()
        return max(_status("VmHWM") - before, 0)

    def repeat(self, request: Request) -> Outcome:
        return self._outcomes[request.key](request.change)

    def forget(self, request: Request) -> None:
        self._known.pop(request.key, None)
        self._outcomes.pop(request.key, None)


def change_inputs(inputs: GlobalArrays, paddings: dict[str, Any], change: Change | None) -> tuple[Arrays, Arrays, dict[str, Any]]:
    """Return the arrays, the cotangents and the values of the padding, all with ``change``."""
    if change is None:
        return inputs.arrays, inputs.cotangents, paddings
    return change.apply(inputs.arrays), change.apply(inputs.cotangents), paddings | change.paddings


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
