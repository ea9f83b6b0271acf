"""Construction of dataclass records from the tables of a TOML file, checked against the annotations of the record's fields."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import is_dataclass
from difflib import get_close_matches
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ring_attn_core.model.checks import LARGEST

KINDS: dict[Any, tuple[str, str, float]] = {
    int: ("an integer", "a list of integers", LARGEST),
    float: ("a number", "a list of numbers", sys.float_info.max),
    str: ("a text", "a list of texts", LARGEST),
}
"""For each type of a value its name, the name of a list of such values, and the largest absolute integer."""


def build_record(kind: type[Any], values: Mapping[str, Any], table: str) -> Any:
    """Build a record of class ``kind`` from the ``values`` of the TOML table ``table``. Raise ValueError if they are invalid."""
    hints = get_type_hints(kind)
    check_keys(table, values, list(hints))
    return kind(**{name: _convert(hints[name], value, f"{table}.{name}".lstrip(".")) for name, value in values.items()})


def check_keys(table: str, values: Mapping[str, Any], known: list[str]) -> None:
    """Raise ValueError if a key of ``values`` is not in ``known``; the message names the nearest known key, if one is near."""
    where = f"[{table}]" if table else "the top of the config"
    for name in values:
        if name not in known:
            near = get_close_matches(name, known, 1, 0.4)
            meant = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"{where} has no key {name!r}: {meant}it has {', '.join(known)}")


def _convert(hint: Any, value: Any, name: str) -> Any:
    """Return ``value`` in the type of the annotation ``hint``. The record itself checks a Literal."""
    hint = get_args(hint)[0] if isinstance(hint, UnionType) else hint  # X | None: TOML has no None
    if get_origin(hint) is Literal:
        return value
    if is_dataclass(hint) or get_origin(hint) is Mapping:
        if not isinstance(value, dict):
            raise ValueError(f"{name} must be a table, [{name}], got {value!r}")
        return build_record(hint, value, name) if is_dataclass(hint) else value  # type: ignore[arg-type]
    several = get_origin(hint) is tuple
    kind = get_args(hint)[0] if several else hint
    one, many, most = KINDS[kind]
    items = value if isinstance(value, list) else [value]
    types = (int, float) if kind is float else (kind,)
    if several != isinstance(value, list) or not all(type(each) in types for each in items):
        raise ValueError(f"{name} must be {many if several else one}, got {value!r}")
    for each in items:
        if isinstance(each, int) and abs(each) > most:
            raise ValueError(f"{name} must be at most {most:.10g}, got {each}: pass a smaller one")
    return tuple(items) if several else kind(items[0])
