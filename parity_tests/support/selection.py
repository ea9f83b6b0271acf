"""Selection of a test's parameters: those that run in ``make test``, those only in ``make test-all``, and the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest


def one_in(n: int, values: Iterable[Any]) -> list[Any]:
    """Return parameters of a test: every ``n``-th runs in ``make test-all``, the others only with ``--full``."""
    return [
        pytest.param(*each, marks=pytest.mark.full if i % n else pytest.mark.exhaustive) for i, each in enumerate(_tuples(values))
    ]


def first(values: Iterable[Any], count: int = 1, most: int | None = None, others: str = "full") -> list[Any]:
    """Return parameters of a test: the first ``count`` run always, those up to ``most`` in ``make test-all``.

    The rest, if ``most`` is given, has the marker ``others``: "full" or "campaign".
    """
    parameters = _tuples(values)
    most = len(parameters) if most is None else most
    marks = [(), pytest.mark.exhaustive, getattr(pytest.mark, others)]
    return [pytest.param(*each, marks=marks[(i >= count) + (i >= max(count, most))]) for i, each in enumerate(parameters)]


def grid(*axes: Iterable[Any]) -> list[Any]:
    """Return parameters of a test: every combination of values of the axes, with the marks of both."""
    rows = product(*(map(_parameter, axis) for axis in axes))
    return [pytest.param(*(x for p in row for x in p.values), marks=[m for p in row for m in p.marks]) for row in rows]


def one_of_each(n: int, values: Iterable[Any]) -> list[Any]:
    """Return parameters of a test: one of each ``n`` in a row runs always, in turn another; the others in ``make test-all``."""
    return [
        pytest.param(*each, marks=() if i % n == i // n % n else pytest.mark.exhaustive) for i, each in enumerate(_tuples(values))
    ]


def in_each(names: str, jax: Iterable[Any], torch: Iterable[Any], slow: str = "", ids: Any = str) -> pytest.MarkDecorator:
    """Parametrise a test over the fixture ``framework`` and over parameters ``names``, of which each framework has its own.

    The ids name the framework first. ``jax``, ``torch``: values, tuples of values, or what the functions above return.
    ``slow``: the framework that takes seconds for each.
    """
    parameters = []
    for name, row in [("jax", each) for each in jax] + [("torch", each) for each in torch]:
        parameter = _parameter(row)
        marks = [*parameter.marks, *[pytest.mark.slow] * (name == slow)]
        named = parameter.id or "-".join(map(ids, parameter.values))
        parameters.append(pytest.param(name, *parameter.values, marks=marks, id=f"{name}-{named}"))
    return pytest.mark.parametrize(f"framework,{names}", parameters, indirect=["framework"])


def mark_repeats(items: Iterable[pytest.Item]) -> None:
    """Mark as exhaustive those cases of each test marked ``pairs`` that others, chosen greedily, make unnecessary."""
    grids: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("pairs") and not any(map(item.get_closest_marker, ("exhaustive", "full", "campaign"))):
            grids[item.nodeid.partition("[")[0]].append(item)
    for cases in grids.values():
        columns = [[id(case.callspec.params[name]) for case in cases] for name in cases[0].callspec.params]
        axes = [axis for axis in dict.fromkeys(tuple(map(each.index, each)) for each in columns) if len({*axis}) > 1]
        of_cases = [{*combinations(enumerate(row), 2 if len(axes) > 2 else 1)} for row in zip(*axes, strict=True)]
        while any(of_cases):
            best = max(range(len(cases)), key=lambda i: len(of_cases[i]))
            of_cases = [pairs - of_cases[best] for pairs in of_cases]
            cases[best] = None
        for case in filter(None, cases if axes else ()):
            case.add_marker(pytest.mark.exhaustive)


def _parameter(value: Any) -> Any:
    return value if hasattr(value, "marks") else pytest.param(*_tuples([value])[0])


def _tuples(values: Iterable[Any]) -> list[tuple[Any, ...]]:
    return [value if isinstance(value, tuple) else (value,) for value in values]
