"""Which backends exist, in the order in which "auto" tries them; each says in words why it cannot solve a problem."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

from .problem import Problem

WIDEST = 256
OLDEST_GPU = 80


@dataclass(frozen=True)
class Backend:
    """``objection(problem)`` is None where the backend can solve it, else the reason in words.

    ``automatic``: "auto" may choose it; one that computes with less precision than its inputs have is chosen by name only.
    """

    name: str
    objection: Callable[[Problem], str | None]
    automatic: bool = True


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


BACKENDS: tuple[Backend, ...] = (
    Backend("triton", _triton),
    Backend("triton_tf32", _triton_tf32, automatic=False),
    Backend("blockwise", lambda problem: None),
)


def runnable(problem: Problem, tma: bool, anywhere: bool = False) -> str:
    """The backend that ``select`` takes, its kernels compiled; the arguments are those of ``calls.call_of``.

    Where they cannot run, "auto" warns and takes blockwise; asked for by name the backend raises ValueError.
    """
    chosen = select(problem, problem.backend)
    if chosen == "blockwise":
        return chosen
    from .calls import call_of
    from .launch import obstacle
    from .steps import of_ring

    reason = obstacle(of_ring(call_of(problem, chosen, tma, anywhere), len(problem.plan.shifts)), problem.capability)
    if reason is None:
        return chosen
    of = f"for {problem.dtypes[0]} heads of {problem.q_shape[-1]} and {problem.v_shape[-1]}"
    if problem.backend != "auto":
        raise ValueError(f'backend={chosen!r} cannot run this: {reason} ({of}). backend="blockwise" can')
    warnings.warn(f'{chosen}: {reason} ({of}). backend="blockwise" runs this instead, much slower', stacklevel=2)
    return "blockwise"


def select(problem: Problem, backend: str = "auto") -> str:
    """The name of the backend that solves ``problem``: the one asked for, or the first without an objection.

    ValueError for an unknown name and for a backend that objects.
    """
    names = [candidate.name for candidate in BACKENDS]
    if backend != "auto" and backend not in names:
        raise ValueError(f'unknown backend {backend!r}: choose "auto" or one of {", ".join(names)}')
    objections = []
    for candidate in BACKENDS:
        if backend == candidate.name or (backend == "auto" and candidate.automatic):
            objection = candidate.objection(problem)
            if objection is None:
                return candidate.name
            objections.append(f"{candidate.name}: {objection}")
    raise ValueError(f"backend={backend!r} cannot run this: " + "; ".join(objections))
