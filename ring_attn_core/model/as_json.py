"""Configs as JSON objects of their fields. Nested dataclasses also have a key ``type``, the class name. Tuples become lists."""

from __future__ import annotations

import json
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, TypeVar

from ..files import parse_json
from ..runs import Band
from ..validation import in_words, is_integer
from .published import Published
from .rotary import SCALINGS, Rotary

Record = TypeVar("Record")

TYPES: dict[str, type] = {record.__name__: record for record in (Band, Rotary, *SCALINGS, Published)}
"""The records that a config may contain, by their ``type`` in JSON."""


def write_record(record: Any) -> str:
    """Return a dataclass as a JSON object of its fields. Only nested dataclasses have a key ``type``, the class name."""
    return json.dumps({name: value for name, value in _plain(record).items() if name != "type"}, indent=2, allow_nan=False)


def read_record(kind: type[Record], text: str) -> Record:
    try:
        values = parse_json(text)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{kind.__name__} is read from JSON, as to_json writes it, got {in_words(text)}: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{kind.__name__} is read from a JSON object, as to_json writes it, got a {type(values).__name__}")
    return _make(kind, values)


def _plain(x: Any) -> Any:
    if is_dataclass(x):
        return {"type": type(x).__name__} | {field.name: _plain(getattr(x, field.name)) for field in named_fields(x)}
    return [_plain(each) for each in x] if isinstance(x, tuple) else x


def _read(x: Any) -> Any:
    if isinstance(x, list):
        return tuple(map(_read, x))
    if not isinstance(x, dict):
        return x
    kind = TYPES.get(str(x.get("type")))
    if kind is None:
        raise ValueError(f"a record in a config has the type {' or '.join(TYPES)}, got {x.get('type')!r} in {json.dumps(x)}")
    return _make(kind, {name: value for name, value in x.items() if name != "type"})


def named_fields(record: Any) -> list[Field[Any]]:
    """Return the fields of a dataclass, those without a default first."""
    return sorted(fields(record), key=lambda field: field.default is not MISSING)


def _make(kind: type[Record], values: dict[str, Any]) -> Record:
    known = {field.name: field for field in named_fields(kind)}
    unknown = [name for name in values if name not in known]
    if unknown:
        raise ValueError(
            f"{kind.__name__} has no {', '.join(map(repr, unknown))}, which a newer release may have written: "
            f"it has {', '.join(known)}"
        )
    needed = [name for name, x in known.items() if x.default is MISSING and x.default_factory is MISSING]
    missing = [name for name in needed if name not in values]
    if missing:
        raise ValueError(f"{kind.__name__} needs {', '.join(map(repr, missing))}, and the JSON leaves it out")
    made = {name: _read(value) for name, value in values.items()}
    strange = [name for name, x in made.items() if kind is Band and x is not None and not is_integer(x)]
    if strange:
        raise ValueError(f"{strange[0]} of a Band must be an int, a number of tokens, or null, got {in_words(made[strange[0]])}")
    return kind(**made)
