"""Records that are keys of look-ups at every call."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")
HASH = "_hash"


def hashed_once(record: type[T]) -> type[T]:
    """Have a frozen dataclass compute its hash when it is first asked for, and keep it with the instance, but not in a pickle."""
    of_fields = record.__hash__

    def __hash__(self: T) -> int:
        known = self.__dict__.get(HASH)
        if known is None:
            known = self.__dict__[HASH] = of_fields(self)
        return known

    def __getstate__(self: T) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != HASH}  # strings hash otherwise elsewhere

    record.__hash__, record.__getstate__ = __hash__, __getstate__  # type: ignore[method-assign, attr-defined]
    return record
