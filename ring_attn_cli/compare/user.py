"""A user's own attention function: import it by name, call it with the arguments it takes, and check its results."""

from __future__ import annotations

import importlib
import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from .cases import Case

Offered = dict[str, Any]
"""Arguments of ring_attention, by name, that a user's function may take."""

ONE_FRAMEWORK = {"group": ("torch", "PyTorch"), "axis_name": ("jax", "JAX")}
"""Arguments that ring_attention has in one framework only, with the name and the title of this framework."""


def load(text: str) -> Callable[..., Any]:
    module, _, name = text.partition(":")
    if not all(part.isidentifier() for part in module.split(".")):
        raise ValueError(f"cannot read {module!r}: write the name of a module, as import does, and no path")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.split(".")[0] and error.name != module:
            raise ValueError(f"{module} imports {error.name}, which is not installed") from error
        if module.endswith(".py"):
            raise ValueError(f"{text} names a file: write the module's name, {module.removesuffix('.py')}:{name}") from error
        raise ValueError(
            f"there is no module {module!r}, neither in this folder nor installed: start in the folder that holds {module}.py"
        ) from error
    except Exception as error:
        raise ValueError(f"{module} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(found, name, None)
    if not callable(function):
        there = [each for each, value in vars(found).items() if inspect.isfunction(value) and not each.startswith("_")]
        raise ValueError(f"{module} has no function {name!r}: it has {', '.join(there) or 'none'}{_hiding_hint(found, module)}")
    return function


def _hiding_hint(found: ModuleType, module: str) -> str:
    """Return a hint if the working folder has a file for ``module`` but Python imported ``found`` from elsewhere, else ""."""
    file = Path(*module.split(".")).with_suffix(".py")
    if not file.is_file() or Path(getattr(found, "__file__", None) or "").resolve() == file.resolve():
        return ""
    return f": {file} here is not read, since Python has another module {module}: give the file another name"


def take(function: Callable[..., Any], text: str, offered: Offered, case: Case) -> Offered:
    """Return the ``offered`` arguments that the function takes besides q, k and v. ``text``: its name, for messages."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ValueError(f"{text} does not say what it takes: wrap it in a function with names for its arguments") from error
    first = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:3]
    if len(first) < 3 and not any(p.kind == p.VAR_POSITIONAL for p in parameters):
        raise ValueError(f"{text} must take q, k and v first, and takes {len(first)} arguments by position")
    others = [p for p in parameters if p not in first and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    unknown = [p.name for p in others if p.default is p.empty and p.name not in offered]
    if unknown:
        other = next((each for each in unknown if each in ONE_FRAMEWORK), None)
        if other is not None:
            framework, title = ONE_FRAMEWORK[other]
            raise ValueError(
                f"{text} needs {other}, which ring_attention has in {title} only: write {framework}:{text}, or give it a default"
            )
        raise ValueError(
            f"{text} needs {', '.join(unknown)}, and only arguments of ring_attention are passed ({', '.join(offered)}): give "
            "it a default"
        )
    names = {*offered} if any(p.kind == p.VAR_KEYWORD for p in parameters) else {p.name for p in others}
    missing = [name for name in case.features if name not in names]
    if missing:
        raise ValueError(f"{text} takes no {', '.join(missing)}, which this case has: add the argument, or leave the option out")
    return {name: value for name, value in offered.items() if name in names}


def check_length(text: str, arguments: Offered, case: Case, held: int) -> None:
    """Raise ValueError if the shards, ``held`` tokens in all, contain padding but the function takes no ``length``."""
    if held != case.length and "length" not in arguments:
        raise ValueError(
            f"{text} takes no length, and {case.length} tokens are padded to {held} in {case.layout}: pass a --length that "
            "the ring divides, or add the argument"
        )


def call(function: Callable[..., Any], text: str, arrays: Offered, arguments: Offered) -> dict[str, Any]:
    """Call the function on the shards q, k, v and return {"out": ...}, with "lse" if it returns one."""
    q, k, v = (arrays[name] for name in "qkv")
    try:
        value = function(q, k, v, **arguments)
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[1:]
        where = f" ({at[0].filename}, line {at[0].lineno})" if at else ""
        raise ValueError(f"{text} failed: {type(error).__name__}: {error}{where}") from error
    results: dict[str, Any] = dict(zip(("out", "lse"), value if isinstance(value, tuple | list) else (value,), strict=False))
    for name, shape in (("out", (*q.shape[:3], v.shape[-1])), ("lse", q.shape[:3])):
        if results.get(name) is None:
            results.pop(name, None)
        elif not hasattr(results[name], "shape") or tuple(results[name].shape) != tuple(shape):
            got = list(results[name].shape) if hasattr(results[name], "shape") else type(results[name]).__name__
            raise ValueError(
                f"{text} returned {name} {got}, expected {list(shape)}: of shards q {list(q.shape)}, k {list(k.shape)} it must "
                "return out [batch, tokens, heads, v_dim], or (out, lse [batch, tokens, heads])"
            )
        elif isinstance(results[name], np.ndarray):
            raise ValueError(f"{text} returned {name} as a numpy array, which has no gradient: return a tensor")
    if "out" not in results:
        raise ValueError(f"{text} returned nothing: it must return out, or (out, lse)")
    return results
