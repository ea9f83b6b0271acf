"""A decorator for public functions. An unknown keyword raises a TypeError that suggests a known keyword if one is close."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

ELSEWHERE = {
    "causal": "mask=causal()",
    "is_causal": "mask=causal()",
    "window": "mask=sliding_window(before, after)",
    "window_size": "mask=sliding_window(before, after)",
    "sliding_window": "mask=sliding_window(before, after)",
    "attn_mask": "mask, extents or key_mask",
    "bias": "alibi_slopes",
    "sequence_process_group": "group",
    "process_group": "group",
    "segment_ids": "extents=document_extents(...)",
    "dropout": "dropout_rate",
    "dropout_p": "dropout_rate",
    "sm_scale": "scale",
    "softmax_scale": "scale",
    "logits_soft_cap": "softcap",
}
"""Keywords of other libraries' attention functions, each with the argument of this library to pass instead."""


def named_keywords(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap ``function`` so that an unknown keyword raises a TypeError with its name here (ELSEWHERE) or a similar spelling."""
    known = list(inspect.signature(function).parameters)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for name in kwargs:
            if name not in known:
                raise TypeError(
                    f"{function.__name__}() has no argument {name!r}" + _instead(name, known) + ". help() lists its arguments"
                )
        return function(*args, **kwargs)

    return call


def _instead(name: str, known: list[str]) -> str:
    """Return the hint for the unknown keyword ``name``, or "" if none of ``known`` has its meaning or a similar spelling."""
    meant = ELSEWHERE.get(name, "")
    if meant and meant.partition("=")[0].split(",")[0] in known:
        return f": pass {meant}"
    near = get_close_matches(name, known, 1)
    return f": did you mean {near[0]}?" if near else ""
