"""What the checks of arguments have in common: whether something counts tokens or ranks, and what was given, in words."""

from __future__ import annotations

from typing import Any


def is_integer(x: Any) -> bool:
    """Whether ``x`` is one integer: an int, a 0-d integer array, or what a framework traces in place of one; no bool."""
    if isinstance(x, bool | int):
        return not isinstance(x, bool)
    return hasattr(x, "__index__") and not getattr(x, "shape", ()) and "int" in str(getattr(x, "dtype", "int")).lower()


def in_words(x: Any) -> str:
    """Return what ``x`` is in a few words: type and shape of an array, a number, text or class itself, else the type."""
    if isinstance(x, str | int | float | None):
        return repr(x)
    if isinstance(x, type):
        return f"the class {x.__name__}"
    shape = getattr(x, "shape", None)
    return type(x).__name__ if shape is None else f"{type(x).__name__} of shape {list(shape)}"
