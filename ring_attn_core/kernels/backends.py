"""Which backends exist, in the order in which "auto" tries them; each says in words why it cannot solve a problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .problem import Problem


@dataclass(frozen=True)
class Backend:
    """``objection(problem)`` is None where the backend can solve it, else the reason in words."""

    name: str
    objection: Callable[[Problem], str | None]


BACKENDS: tuple[Backend, ...] = (Backend("blockwise", lambda problem: None),)


def select(problem: Problem, backend: str = "auto") -> str:
    """The name of the backend that solves ``problem``: the one asked for, or the first without an objection.

    ValueError for an unknown name and for a backend that objects.
    """
    names = [candidate.name for candidate in BACKENDS]
    if backend != "auto" and backend not in names:
        raise ValueError(f'unknown backend {backend!r}: choose "auto" or one of {", ".join(names)}')
    objections = []
    for candidate in BACKENDS:
        if backend in ("auto", candidate.name):
            objection = candidate.objection(problem)
            if objection is None:
                return candidate.name
            objections.append(f"{candidate.name}: {objection}")
    raise ValueError(f"backend={backend!r} cannot run this: " + "; ".join(objections))
