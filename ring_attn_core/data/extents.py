"""Extents: one interval of visible key positions per query, for masks that no band (causal, full, sliding window) can express.

Left: documents of 3, 1 and 4 tokens, then two tokens of padding. Right: a prefix of 4 tokens, then 3 causal ones (p: position):

    ids      0  0  0  1  2  2  2  2 -1 -1          p   0  1  2  3  4  5  6
    first    0  0  0  3  4  4  4  4  0  0              0  0  0  0  0  0  0
    end      3  3  3  4  8  8  8  8  0  0              4  4  4  4  5  6  7

A query with the extent [0, 0) sees no key. Such a query is *blank* (``plan/ring.py``). Here the arguments of ``document_extents``
and ``prefix_extents`` are checked, on NumPy arrays.
"""

from __future__ import annotations

from typing import Any

from ..layouts import check_length
from ..lazy_numpy import np


def check_one_form(ids: Any, cu_seqlens: Any, length: Any) -> None:
    if (ids is None) == (cu_seqlens is None):
        raise ValueError(f"document_extents takes either ids or cu_seqlens, got {'neither' if ids is None else 'both'}")
    if ids is not None and length is not None:
        raise ValueError(f"length={length} goes with cu_seqlens: ids have their own length, leave it out")


def find_disorder(ids: Any, highest: Any) -> tuple[Any, Any]:
    """Return bool [batch, length - 1] twice: ids that decrease, and ids that go on after padding."""
    before, this, highest = ids[:, :-1], ids[:, 1:], highest[:, :-1]
    return (this >= 0) & (this < highest), (this >= 0) & (this == highest) & (before < 0)


def check_ids(ids: np.ndarray | None, where: str) -> None:
    """Check the document ids [batch, length], unless they are None. ``where``: the function's name in the framework."""
    if ids is None:
        return
    highest = np.maximum.accumulate(ids, 1)
    decreasing, torn = find_disorder(ids, highest)
    for row, i in np.argwhere(decreasing | torn)[:1]:
        found = f"document {ids[row, i + 1]} at row {row}, token {i + 1}"
        if decreasing[row, i]:
            wrong = f"document ids must not decrease along a row, got {found}, after {highest[row, i]}"
            zero = f"if 0 is padding, as in MaxText, make it negative: {where}(ids == 0, -1, ids)"
            raise ValueError(f"{wrong}: " + ("sort them" if ids[row, i + 1] else f"{zero}; else sort them"))
        raise ValueError(
            f"padding (a negative id) inside a document cannot be an extent, one interval per query: {found}, goes on after it. "
            "Give what follows a new id, or give that padding the document's id and mask it with key_mask"
        )


def length_of(ends: np.ndarray | None, count: int, length: int | None, unknown: str) -> int:
    """Return the number of positions of packed documents. ``ends``: None if unknown; ``unknown``: the error's end."""
    if length is not None:
        check_length(length)
    elif ends is None:
        raise ValueError(f"document_extents needs length=... {unknown}")
    if count == 0 or (ends is not None and (ends[0] != 0 or (ends[1:] < ends[:-1]).any())):
        got = "nothing" if ends is None else _short(ends)
        raise ValueError(f"cu_seqlens must be 0 and then the end of every document, none before the last, got {got}")
    if ends is not None and length is not None and ends[-1] > length:
        raise ValueError(f"cu_seqlens ends at {ends[-1]}, beyond length={length}: pass a length of at least {ends[-1]}")
    return length if length is not None else int(ends[-1])  # type: ignore[index]  # refused above where ends is None


def check_prefix(prefix: np.ndarray | None, length: int) -> None:
    if prefix is not None and ((prefix < 0) | (prefix > length)).any():
        raise ValueError(f"prefix must be 0 to length={length} tokens, got {_short(prefix)}")


def _short(values: np.ndarray) -> str:
    return np.array2string(values, threshold=8, separator=", ")
