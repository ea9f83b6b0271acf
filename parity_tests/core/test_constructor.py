"""Constructors that take the fields of a record: their signatures, their TypeErrors, and the parts of the record."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field

import pytest

from ring_attn_core.constructor import extract, takes


@dataclass(frozen=True, kw_only=True)
class Sizes:
    heads: int = field(kw_only=False)
    window: int | None = None


@dataclass(frozen=True, kw_only=True)
class Arguments(Sizes):
    name: str = "a"
    window: int | None = field(default=3, init=False)


class Made:
    @takes(Arguments)
    def __init__(self, arguments: Arguments) -> None:
        """Make it."""
        self.arguments = arguments

    @classmethod
    @takes(Sizes)
    def of(cls, sizes: Sizes) -> Made:
        return cls(sizes.heads)


def test_the_signature_and_the_docstring_are_those_of_the_fields():
    assert str(inspect.signature(Made)) == "(heads: 'int', *, name: 'str' = 'a') -> 'None'"
    assert str(inspect.signature(Made.of)) == "(heads: 'int', *, window: 'int | None' = None) -> 'Made'"
    assert str(inspect.signature(inspect.getattr_static(Made, "of").__func__)).startswith("(cls, heads")
    assert Made.__init__.__doc__ == "Make it."


def test_arguments_arrive_as_the_record():
    assert Made(2, name="b").arguments == Arguments(2, name="b")
    assert Made.of(heads=5).arguments.heads == 5


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        ((), {}, r"Made.__init__\(\) missing 1 required positional argument: 'heads'"),
        ((1, 2), {}, r"Made.__init__\(\) takes 2 positional arguments but 3 were given"),
        ((1,), {"window": 2}, r"Made.__init__\(\) got an unexpected keyword argument 'window'"),
    ],
)
def test_a_type_error_names_the_method(arguments, keywords, message):
    with pytest.raises(TypeError, match=message):
        Made(*arguments, **keywords)


def test_a_part_has_the_values_under_the_names_of_its_fields():
    assert extract(Sizes, Arguments(4, name="c")) == Sizes(4, window=3)
