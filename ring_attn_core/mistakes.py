"""What the checks of arguments share: whether something counts tokens or ranks, as a Python number, and in words."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

STATIC = (
    ". Its value must be known when the program is traced: name it in static_argnums or static_argnames of jax.jit, or bind it "
    "with functools.partial before jit; what changes from call to call is said by arrays, such as extents"
)
"""What to do about a traced array in place of a Python number."""


def is_integer(x: Any) -> bool:
    """Whether ``x`` is one integer: an int, a 0-d integer array, or what a framework traces in place of one; no bool."""
    if isinstance(x, bool | int):
        return not isinstance(x, bool)
    return hasattr(x, "__index__") and not getattr(x, "shape", ()) and "int" in str(getattr(x, "dtype", "int")).lower()


def is_traced(x: Any) -> bool:
    """Return whether ``x`` is an array that JAX traces, whose value is not known."""
    if x is None or isinstance(x, bool | int | float):  # which torch.compile follows, and not what comes after
        return False
    return any(kind.__name__ == "Tracer" for kind in type(x).__mro__)


def as_number(x: Any) -> Any:
    """Return the Python number that a NumPy scalar or a 0-d NumPy array holds, anything else as it is."""
    if x is None or isinstance(x, bool) or type(x) in (int, float):
        return x
    if getattr(x, "shape", None) == () and type(x).__module__.partition(".")[0] == "numpy":
        x = x.item()
    if isinstance(x, Integral) and not isinstance(x, bool):
        return int(x)
    return float(x) if isinstance(x, Real) and not isinstance(x, bool) else x


def hold_numbers(record: Any, names: Iterable[str]) -> None:
    """Replace NumPy scalars in these fields of a frozen record by Python numbers: records are compared, hashed and written."""
    for name in names:
        value = getattr(record, name)
        if value is None or isinstance(value, int | str):  # before type(), which torch.compile does not follow for every int
            continue
        if type(value) is not float:
            object.__setattr__(record, name, as_number(value))


def in_words(x: Any) -> str:
    """Return what ``x`` is in a few words: type and shape of an array, a number, text or class itself, else the type."""
    if isinstance(x, str | int | float | None):
        return repr(x)
    if isinstance(x, type):
        return f"the class {x.__name__}"
    shape = getattr(x, "shape", None)
    if is_traced(x):
        return f"a traced array of shape {list(shape or ())}"
    return type(x).__name__ if shape is None else f"{type(x).__name__} of shape {list(shape)}"


def number_in_words(x: Any) -> str:
    """Return ``in_words(x)`` and, if ``x`` is traced, how to pass a Python number instead."""
    return in_words(x) + (STATIC if is_traced(x) else "")


def counts_of(name: str, values: Any) -> tuple[int, ...]:
    """Return the counts of tokens as ints. Raise ValueError if ``values`` is not a list of integers."""
    counts = tuple(map(as_number, values)) if isinstance(values, tuple | list) else None
    if counts is None or not all(isinstance(x, int) and not isinstance(x, bool) for x in counts):
        got = in_words(values) if counts is None else f"({', '.join(map(number_in_words, counts))})"
        raise ValueError(f"{name} must be a tuple of ints, counts of tokens, one for each pattern, got {got}")
    return counts
