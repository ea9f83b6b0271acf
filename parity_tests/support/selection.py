"""The choice of a test's parameters that run in every ``make test``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def first(values: Iterable[Any], count: int = 1) -> list[Any]:
    """Return parameters of a test: the first ``count`` run always, the others only in ``make test-all``."""
    parameters = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*each, marks=pytest.mark.exhaustive if i >= count else ()) for i, each in enumerate(parameters)]
