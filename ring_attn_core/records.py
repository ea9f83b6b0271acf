"""Caches of frozen records and of their hashes, because every call of an op looks records up."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")
HASH = "_hash"
MAX_KNOWN = 1024
"""Largest number of entries of a cache indexed by ``Problem``. In a balanced layout each batch adds an entry of up to 100 KB."""


def remember(make: Callable[P, T]) -> Callable[P, T]:
    """Cache the records that ``make`` returns by arguments and types; on TypeError, let its own checks raise."""
    known = lru_cache(maxsize=4096, typed=True)(make)

    @wraps(make)
    def recall(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return known(*args, **kwargs)
        except TypeError:
            return make(*args, **kwargs)

    return recall


def add_newest(known: dict[T, Any], record: T, value: Any = None, most: int | None = None) -> None:
    """Set ``known[record] = value``. Then remove the oldest entry if ``len(known) > most``; ``most=None`` means MAX_KNOWN."""
    known[record] = value
    if len(known) > (most or MAX_KNOWN):
        del known[next(iter(known))]


def hash_once(record: type[T]) -> type[T]:
    """Make a frozen dataclass cache its hash on the instance at first use. Pickles do not contain the hash."""
    hash_fields = record.__hash__

    def __hash__(self: T) -> int:
        known = self.__dict__.get(HASH)
        if known is None:
            known = self.__dict__[HASH] = hash_fields(self)
        return known

    def __getstate__(self: T) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != HASH}  # each process hashes strings differently

    record.__hash__, record.__getstate__ = __hash__, __getstate__  # type: ignore[method-assign, attr-defined]
    return record
