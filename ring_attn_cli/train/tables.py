"""Construction of dataclass records from the tables of a TOML file, checked against the annotations of the record's fields."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, NamedTuple, get_args, get_type_hints

from ring_attn_core.model.checks import LARGEST


def made(kind: type[Any], values: Mapping[str, Any], table: str) -> Any:
    """Build a record of class ``kind`` from the ``values`` of the TOML table ``table``. Raise ValueError if they are invalid."""
    hints = get_type_hints(kind)
    check_keys(table, values, [x.name for x in fields(kind)])
    return kind(**{name: _value(hints[name], value, f"{table}.{name}".lstrip(".")) for name, value in values.items()})


def check_keys(table: str, values: Mapping[str, Any], known: list[str]) -> None:
    """Raise ValueError if a key of ``values`` is not in ``known``; the message names the nearest known key, if one is near."""
    where = f"[{table}]" if table else "the top of the config"
    for name in values:
        if name not in known:
            near = get_close_matches(name, known, 1, 0.4)
            meant = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"{where} has no key {name!r}: {meant}it has {', '.join(known)}")


class ValueType(NamedTuple):
    """A type of config values; ``words``: its name in errors.
    ``fits``: whether a value in the file has it. ``held``: converts the value to the record's. ``most``: the largest absolute
    integer."""

    words: str
    fits: Callable[[Any], bool]
    held: Callable[[Any], Any]
    most: float = LARGEST


def _tables(x: Any) -> tuple[dict[str, Any], ...]:
    return tuple(x) if isinstance(x, list) else (x,)


def _are_tables(x: Any) -> bool:
    return bool(x) and all(isinstance(each, dict) for each in _tables(x))


FORMS: dict[str, ValueType] = {
    "tuple[collections.abc.Mapping": ValueType("a table, or a list of tables", _are_tables, _tables),
    "tuple[str": ValueType("a list of texts", lambda x: isinstance(x, list) and all(type(each) is str for each in x), tuple),
    "Mapping": ValueType("a table", lambda x: isinstance(x, dict), dict),
    "tuple": ValueType("a list of integers", lambda x: isinstance(x, list) and all(type(each) is int for each in x), tuple),
    "float": ValueType("a number", lambda x: isinstance(x, int | float) and not isinstance(x, bool), float, sys.float_info.max),
    "str": ValueType("a text", lambda x: isinstance(x, str), str),
    "int": ValueType("an integer", lambda x: isinstance(x, int) and not isinstance(x, bool), int),
}
"""Value types by a part of a field's annotation; the first key that occurs in the annotation counts."""


def _value(hint: Any, value: Any, name: str) -> Any:
    record = next((each for each in (hint, *get_args(hint)) if hasattr(each, "__dataclass_fields__")), None)
    if record is not None:
        if not isinstance(value, dict):
            raise ValueError(f"{name} must be a table, [{name}], got {value!r}")
        return made(record, value, name)
    form = next(form for kind, form in FORMS.items() if kind in str(hint))
    if not form.fits(value):
        raise ValueError(f"{name} must be {form.words}, got {value!r}")
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, int) and abs(each) > form.most:
            raise ValueError(f"{name} must be at most {form.most:.10g}, got {each}: pass a smaller one")
    return form.held(value)
