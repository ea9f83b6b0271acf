"""Records that are looked up at every call."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")
HASH = "_hash"


def remembered(make: Callable[P, T]) -> Callable[P, T]:
    """Have equal arguments of equal types give the record that was made of them before.

    Of arguments that cannot be hashed one is made every time, for it is the record's to say what is wrong with them.
    """
    known = lru_cache(maxsize=4096, typed=True)(make)

    @wraps(make)
    def recall(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return known(*args, **kwargs)
        except TypeError:
            return make(*args, **kwargs)

    return recall


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
