"""Selection of a test's parameters: those that run in ``make test``, those only in ``make test-all``, and the others."""

from __future__ import annotations

from collections.abc import Iterable
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


def one_of_each(n: int, values: Iterable[Any]) -> list[Any]:
    """Return parameters of a test: one of each ``n`` in a row runs always, in turn another; the others in ``make test-all``."""
    return [
        pytest.param(*each, marks=() if i % n == i // n % n else pytest.mark.exhaustive) for i, each in enumerate(_tuples(values))
    ]


def _tuples(values: Iterable[Any]) -> list[tuple[Any, ...]]:
    return [value if isinstance(value, tuple) else (value,) for value in values]
