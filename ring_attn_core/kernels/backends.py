"""Which backends exist, in the order in which "auto" tries them; each says in words why it cannot solve a problem."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from .hopper import refusal_of_shape
from .problem import Problem

if TYPE_CHECKING:
    from .calls import Call

WIDEST = 256
OLDEST_GPU = 80


@dataclass(frozen=True)
class Backend:
    """``objection(problem)`` is None where the backend can solve it, else the reason in words.

    ``drawback(problem)``: why "auto" passes it over, though by name it solves the problem; else None.
    """

    name: str
    objection: Callable[[Problem], str | None]
    drawback: Callable[[Problem], str | None] = lambda problem: None


def _triton(problem: Problem) -> str | None:
    if not problem.capability:
        return f"its kernels run on NVIDIA GPUs, and these arrays are on {problem.device}"
    if problem.capability < OLDEST_GPU:
        return f"its kernels need a GPU of compute capability 8.0 (sm_80), and this one is sm_{problem.capability}"
    if find_spec("triton") is None:
        return "the package triton is not installed: pip install triton"
    if problem.dtypes[0] == "float64":
        return "its kernels take bfloat16, float16 and float32, not float64"
    for name, width in (("head_dim", problem.q_shape[-1]), ("v_dim", problem.v_shape[-1])):
        if width > WIDEST:
            return f"its kernels take head sizes of at most {WIDEST}, and {name} is {width}"
    return None


def _triton_tf32(problem: Problem) -> str | None:
    if problem.dtypes[0] != "float32":
        return f'tf32 is for float32 inputs, and these are {problem.dtypes[0]}: use "triton"'
    return _triton(problem)


def _has_gluon() -> bool:
    try:
        return find_spec("triton.experimental.gluon") is not None
    except ModuleNotFoundError:
        return False


def _hopper(problem: Problem) -> str | None:
    if not problem.capability:
        return _triton(problem)
    if problem.capability != 90:
        return f"its kernels are for Hopper GPUs (sm_90), and this one is sm_{problem.capability}"
    if find_spec("triton") is None:
        return "the package triton is not installed: pip install triton"
    if not _has_gluon():
        return "its kernels are written in Gluon, which this triton does not have: pip install 'triton>=3.6'"
    return refusal_of_shape(problem.dtypes[0], problem.q_shape[-1], problem.v_shape[-1])


def _drawback_of_hopper(problem: Problem) -> str | None:
    """Forward on one H200: with softcap 3.6 ms against 3.3, with ALiBi 2.6 against 2.4 (benchmarks/results/kernel-h200.json)."""
    if problem.softcap is not None:
        return "with softcap the portable kernels are faster"
    if any(array.name == "alibi_slopes" for array in problem.arrays):
        return "with ALiBi the portable kernels are faster"
    if problem.q_shape[-1] > 128:
        return "its tiles of heads wider than 128 are measured on no GPU"
    if triton_release() > (3, 7):
        return "Triton newer than 3.7 compiles it with spills, and no GPU has run that"
    return None


def triton_release() -> tuple[int, ...]:
    """Major and minor number of the installed Triton, (0, 0) where there is none under that name."""
    try:
        return tuple(map(int, version("triton").split(".")[:2]))
    except PackageNotFoundError:
        return 0, 0


BACKENDS: tuple[Backend, ...] = (
    Backend("hopper", _hopper, _drawback_of_hopper),
    Backend("triton", _triton),
    Backend("triton_tf32", _triton_tf32, lambda problem: "it is less precise than its inputs"),
    Backend("blockwise", lambda problem: None),
)


def runnable(problem: Problem, tma: bool, anywhere: bool = False) -> Call | None:
    """The call of the backend that ``select`` takes, its kernels compiled; None: blockwise. Arguments as of ``calls.call_of``.

    Where they cannot run, "auto" warns and takes the next backend; asked for by name the backend raises ValueError.
    """
    from .calls import call_of
    from .launch import obstacle
    from .steps import of_ring

    of = f"for {problem.dtypes[0]} heads of {problem.q_shape[-1]} and {problem.v_shape[-1]}"
    failed: list[str] = []
    while True:
        chosen = select(problem, problem.backend, failed)
        if chosen == "blockwise":
            return None
        call = call_of(problem, chosen, tma, anywhere)
        reason = obstacle(of_ring(call, len(problem.plan.shifts)), problem.capability)
        if reason is None:
            return call
        if problem.backend != "auto":
            raise ValueError(f'backend={chosen!r} cannot run this: {reason} ({of}). backend="blockwise" can')
        failed.append(chosen)
        instead = select(problem, "auto", failed)
        warnings.warn(f"{chosen}: {reason} ({of}). backend={instead!r} runs this instead, slower", stacklevel=2)


def select(problem: Problem, backend: str = "auto", failed: Collection[str] = ()) -> str:
    """The name of the backend that solves ``problem``: the one asked for, or the first without an objection that has not failed.

    ValueError for an unknown name and for a backend that objects.
    """
    names = [candidate.name for candidate in BACKENDS]
    if backend != "auto" and backend not in names:
        raise ValueError(f'unknown backend {backend!r}: choose "auto" or one of {", ".join(names)}')
    objections = []
    for candidate in BACKENDS:
        if backend == candidate.name or (backend == "auto" and candidate.name not in failed):
            objection = candidate.objection(problem) or (candidate.drawback(problem) if backend == "auto" else None)
            if objection is None:
                return candidate.name
            objections.append(f"{candidate.name}: {objection}")
    raise ValueError(f"backend={backend!r} cannot run this: " + "; ".join(objections))
