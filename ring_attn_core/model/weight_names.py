"""Whether a state, weights by name, fits a module."""

from __future__ import annotations

from collections.abc import Mapping

Shapes = Mapping[str, tuple[int, ...]]


def check_state(expected: Shapes, got: Shapes) -> None:
    """ValueError that lists every parameter that is missing, unexpected or of another shape."""
    problems = [f"{name} is missing" for name in expected if name not in got]
    problems += [f"{name} is unexpected" for name in got if name not in expected]
    problems += [
        f"{name} is {list(got[name])} and must be {list(shape)}"
        for name, shape in expected.items()
        if name in got and tuple(got[name]) != tuple(shape)
    ]
    if problems:
        listed = "; ".join(problems)
        raise ValueError(f"the state does not fit this module: {listed}. Build the module with the sizes the state was made with")
