"""Masks as bands: a query sees a key if the lag ``q_pos - k_pos`` is between two limits.

With 6 tokens (rows are queries, columns keys, # is visible):

    full()      causal()    sliding_window(2)   sliding_window(1, after=1)
    ######      #.....      #.....              ##....
    ######      ##....      ##....              ###...
    ######      ###...      ###...              .###..
    ######      ####..      .###..              ..###.
    ######      #####.      ..###.              ...###
    ######      ######      ...###              ....##

Other masks are separate arguments of a call. Packed documents and a prefix (with ``full()``) are passed as ``extents=``, made by
``document_extents`` and ``prefix_extents`` in ``data/extents.py`` of both packages. Padding among the keys is hidden by
``key_mask=``. A query that sees no key is *blank* (plan/ring.py): its out is 0, and its lse is -inf or, with sinks, the sink.
"""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any

from .runs import Band
from .validation import as_number, in_words, is_integer, is_traced, number_in_words


def full() -> Band:
    """Return the mask in which every query sees every key."""
    return Band()


def causal(offset: int = 0) -> Band:
    """Return the mask in which a query sees the keys at or before ``q_pos + offset``.

    ``offset`` counts token positions. If the queries are the last tokens of the key sequence (bottom-right alignment), pass
    ``kv_length - length``: the number of keys minus the number of queries.
    """
    return Band(lo=-_integer("offset", offset))


def sliding_window(before: int, after: int = 0, offset: int = 0) -> Band:
    """Return the mask in which a query sees keys ``q_pos + offset - before`` to ``q_pos + offset + after``.

    The arguments count token positions; a query sees at most ``before + after + 1`` keys. A Hugging Face window of ``w`` is
    ``before = w - 1``. Raise ValueError if an argument is not an int, or ``before`` or ``after`` is negative.
    """
    before, after, offset = _integer("before", before), _integer("after", after), _integer("offset", offset)
    if before < 0 or after < 0:
        raise ValueError(
            f"sliding_window needs before >= 0 and after >= 0, got before={before}, after={after}: "
            "before=0, after=0 is a token that sees only itself. For an open side (-1 in flash_attn) pass causal(after) or "
            "Band(hi=before); use offset to shift the window"
        )
    return Band(lo=-after - offset, hi=before - offset)


MASKS: dict[str, Callable[..., Band]] = {"full": full, "causal": causal, "sliding_window": sliding_window}
"""The mask functions by name, for command lines and tests."""


def check_mask(mask: Any) -> None:
    if isinstance(mask, Band):
        return
    if isinstance(mask, tuple | list) and len(mask) == 2 and all(map(is_integer, mask)):
        got, hint = str(tuple(mask)), "a window (before, after) is sliding_window(before, after)"
    elif name := next((name for name, make in MASKS.items() if mask is make), None):
        got, hint = f"the function {name}", f"call it, mask={name}(...)"
    elif mask is None or (isinstance(mask, str) and mask in MASKS):
        got, hint = in_words(mask), "pass mask=causal(), or mask=full() for all keys"
    else:
        got = in_words(mask)
        hint = "pass key_mask=, a bool array, False for padding, and for packed documents extents=, made by document_extents"
    raise ValueError(f"mask must be full(), causal(...) or sliding_window(...), got {got}: {hint}")


def with_numbers(band: Band) -> Band:
    if type(band.lo) in (int, NoneType) and type(band.hi) in (int, NoneType):
        return band
    return Band(as_number(band.lo), as_number(band.hi))


def parse(text: str) -> Band:
    """Parse a mask from a command line: ``full``, ``causal[:OFFSET]`` or ``sliding_window:BEFORE[:AFTER[:OFFSET]]``."""
    name, *numbers = text.split(":")
    try:
        return MASKS[name](*map(int, numbers))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"cannot read the mask {text!r}: write full, causal[:offset] or sliding_window:before[:after[:offset]], "
            "with numbers in token positions, before and after not negative"
        ) from error


def _integer(name: str, value: int) -> int:
    if isinstance(value, bool) or is_traced(value) or not (isinstance(value, int) or hasattr(value, "__index__")):
        raise ValueError(f"{name} counts token positions, so it must be an int, got {number_in_words(value)}")
    return value if isinstance(value, int) else value.__index__()
