"""Constructors that take the fields of a record as arguments, so that each argument is declared only once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
Record = TypeVar("Record")
Self = TypeVar("Self")
T = TypeVar("T")


def takes(record: Callable[P, Record]) -> Callable[[Callable[[Self, Record], T]], Callable[Concatenate[Self, P], T]]:
    """Return a decorator for a method that makes its only argument, a ``record``, from the record's fields.
    ``inspect``, ``help`` and type checkers show these. A TypeError names the method, or the last decorated one if several share
    ``record``."""
    constructor: Any = record.__init__  # type: ignore[misc]

    def of_fields(method: Callable[[Self, Record], T]) -> Callable[Concatenate[Self, P], T]:
        constructor.__qualname__ = method.__qualname__

        @wraps(method)
        def call(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> T:
            return method(self, record(*args, **kwargs))

        own, record_signature = inspect.signature(method), inspect.signature(constructor)
        first, (_, *taken) = next(iter(own.parameters.values())), record_signature.parameters.values()
        call.__signature__ = own.replace(parameters=[first, *taken])  # type: ignore[attr-defined]
        return call

    return of_fields


def extract(record: type[Record], source: Any) -> Record:
    """Make an instance of the dataclass ``record``: copy each field that the object ``source`` has as an attribute."""
    return record(**{x.name: getattr(source, x.name) for x in fields(record) if hasattr(source, x.name)})  # type: ignore[arg-type]
