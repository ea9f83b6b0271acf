"""The covering array is one: any two values of two fields meet in some case, and the cases are few."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from ..support.cases import Case
from ..support.combinations import AXES, COMBINATIONS, WITH_BLANKS


def chosen(axis: str, choice: str) -> dict[str, object]:
    """Every field that the axis is about, and its value in a case of that choice."""
    fields = {name for values in AXES[axis].values() for name in values}
    return {name: AXES[axis][choice].get(name, getattr(Case, name)) for name in fields}


@pytest.mark.parametrize(("a", "b"), list(combinations(AXES, 2)))
def test_every_two_choices_meet(a, b):
    for one, other in product(AXES[a], AXES[b]):
        wanted = chosen(a, one) | chosen(b, other)
        assert any(wanted.items() <= vars(case).items() for case in COMBINATIONS), (one, other)


@pytest.mark.parametrize("axis", AXES)
def test_the_choices_of_an_axis_differ(axis):
    choices = [chosen(axis, choice) for choice in AXES[axis]]
    assert all(a != b for a, b in combinations(choices, 2))


def test_the_cases_are_few_and_see_something():
    assert len(COMBINATIONS) <= 40
    assert sum(case.visible.any() for case in COMBINATIONS) == len(COMBINATIONS)


def test_blanks_of_every_kind_are_there():
    """Find queries that see nothing, with sinks and without, and keys that no query sees."""
    unseeing = [case for case in WITH_BLANKS if not case.visible.any(2).all()]
    assert {case.sinks for case in unseeing} == {True, False}
    assert any(not case.visible.any(1).all() for case in WITH_BLANKS)
