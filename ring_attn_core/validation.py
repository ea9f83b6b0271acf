"""Helpers of argument checks: type tests, conversion from NumPy scalars, and values in error messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any

STATIC = (
    ". Its value must be known when the program is traced: name it in static_argnums or static_argnames of jax.jit, or bind it "
    "with functools.partial before jit; what changes from call to call is said by arrays, such as extents"
)
"""Hint that ends an error if a traced array was passed in place of a Python number."""


def is_integer(x: Any) -> bool:
    """Return whether ``x`` is a single integer: an int or a 0-d integer array, traced or not. A bool does not count."""
    if isinstance(x, bool | int):
        return not isinstance(x, bool)
    return hasattr(x, "__index__") and not getattr(x, "shape", ()) and "int" in str(getattr(x, "dtype", "int")).lower()


def is_finite(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and -math.inf < x < math.inf


def is_traced(x: Any) -> bool:
    """Return whether ``x`` is traced by JAX, so that its value is unknown."""
    if x is None or isinstance(x, bool | int | float):  # torch.compile traces this line, but not the next
        return False
    return any(kind.__name__ == "Tracer" for kind in type(x).__mro__)


def as_number(x: Any) -> Any:
    """Convert a NumPy scalar, 0-d NumPy array or other real number to an int, float or bool; return anything else unchanged."""
    if x is None or isinstance(x, bool) or type(x) in (int, float):
        return x
    if getattr(x, "shape", None) == () and type(x).__module__.partition(".")[0] == "numpy":
        x = x.item()
    if isinstance(x, Integral) and not isinstance(x, bool):
        return int(x)
    return float(x) if isinstance(x, Real) and not isinstance(x, bool) else x


def hold_numbers(record: Any, names: Iterable[str]) -> None:
    """Replace NumPy scalars in a frozen record by Python numbers, in place, so that equal records compare and hash alike."""
    for name in names:
        value = getattr(record, name)
        if value is None or isinstance(value, int | str):  # before type(), which torch.compile does not trace for every int
            continue
        if type(value) is not float:
            object.__setattr__(record, name, as_number(value))


def in_words(x: Any) -> str:
    """Describe ``x`` for an error: numbers, str and None by repr, arrays by type and shape, classes by name, others by type."""
    if isinstance(x, str | int | float | None):
        return repr(x)
    if isinstance(x, type):
        return f"the class {x.__name__}"
    shape = getattr(x, "shape", None)
    if is_traced(x):
        return f"a traced array of shape {list(shape or ())}"
    name = type(x).__name__.removesuffix("Impl")  # JAX's ArrayImpl
    return f"{name} of shape {list(shape)}" if isinstance(shape, tuple) else name  # nnx.Rngs has every attribute


def number_in_words(x: Any) -> str:
    """Return ``in_words(x)``, followed by the hint ``STATIC`` if ``x`` is traced."""
    return in_words(x) + (STATIC if is_traced(x) else "")


def check_integer(name: str, x: Any, static: bool = False) -> None:
    """Raise ValueError, naming ``name``, if ``is_integer(x)`` is False, or if ``static`` is True and ``x`` is traced."""
    if not is_integer(x):
        raise ValueError(f"{name} must be one integer, got {in_words(x)}")
    if static and is_traced(x):
        raise ValueError(f"{name} must be a Python number, got {number_in_words(x)}")


def counts_of(name: str, values: Any) -> tuple[int, ...]:
    """Return ``values`` as a tuple of ints. Raise ValueError, naming ``name``, if they are not a tuple or list of integers."""
    counts = tuple(map(as_number, values)) if isinstance(values, tuple | list) else None
    if counts is None or not all(isinstance(x, int) and not isinstance(x, bool) for x in counts):
        got = in_words(values) if counts is None else f"({', '.join(map(number_in_words, counts))})"
        raise ValueError(f"{name} must be a tuple of ints, counts of tokens, one for each pattern, got {got}")
    return counts


def check_mixin_first(kind: type, mixin: type, is_base: Callable[[type], bool]) -> None:
    """Check that no class that ``mixin`` extends precedes it in ``kind``: its methods would run in place of the mixin's."""
    order = kind.__mro__
    first = next((each for each in order[: order.index(mixin)] if is_base(each)), None)
    if first is not None:
        names = lambda bases: ", ".join(base.__name__ for base in bases)
        mixed = sorted(kind.__bases__, key=lambda base: not issubclass(base, mixin))
        raise ValueError(
            f"put {mixed[0].__name__} first: class {kind.__name__}({names(mixed)}), because in "
            f"class {kind.__name__}({names(kind.__bases__)}) the methods of {first.__name__} run in place of {mixin.__name__}'s"
        )


def missing_package(needing: str, package: str, extra: str | None = None) -> ModuleNotFoundError:
    """Return the error for a missing package; ``extra``: the extra of ring-attn that installs it, by default its name."""
    message = f"{needing} needs {package}: run pip install 'ring-attn[{extra or package}]'"
    return ModuleNotFoundError(message, name=package)
