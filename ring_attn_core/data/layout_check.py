"""The checks that each token of a shard is at a position that its extent allows. They find calls with a wrong layout.

A query sees keys of its own document, so under a causal mask the extent of a query begins at or before the query. An example:
documents of 3 and 5 tokens are sharded over 2 ranks in a balanced layout, but the call says that the layout is zigzag:

    rank 0 holds      0  1  2  3         rank 1 holds      4  5  6  7
    extents begin     0  0  0  3         extents begin     3  3  3  3
    zigzag says       0  1  6  7         zigzag says       2  3  4  5        an extent begins at 3, its query would be at 2

The check does not notice if tokens of one document exchange their positions. If tokens of a prefix tree exchange theirs, at least
one rank notices, because the key extent of a token begins at the token.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..lazy_numpy import np

AGAIN = (
    "pass the layout by which these tokens were sharded, layout=shard.layout for a balanced one, and the shard's arrays unchanged"
)


def where_held(extents: Any, runs: Iterable[tuple[int, int, int, int]], first: int) -> tuple[bool, bool]:
    """Return whether a rank's nonempty extents contain their tokens' positions, in the layout and in natural order.
    ``extents`` [rows, tokens, 2] of NumPy. ``runs``: (base, length, start, stride). ``first``: position of the first token in
    natural order."""
    found = []
    for base, length, start, stride in runs:
        begin, end = extents[:, base : base + length, 0], extents[:, base : base + length, 1]
        places = np.arange(length) * stride + start, np.arange(length) + first + base
        found.append([bool(((begin <= at) & (end > at) | (begin >= end)).all()) for at in places])
    in_layout, in_order = map(all, zip(*found, strict=True))
    return in_layout, in_order


def check_order(name: str, ranks: Iterable[Any]) -> None:
    """Raise ValueError if extents fit the tokens in natural order only. ``ranks``: the result of ``where_held`` for each rank."""
    found = [each for each in ranks if each]
    if found and not all(in_layout for in_layout, _ in found) and all(in_order for _, in_order in found):
        raise ValueError(
            f"{name} lie in natural order, and not in the order of the tokens: each fits the position that its token would have "
            f"in natural order. Shard them like the tokens, to_layout({name}, layout, ranks)"
        )


def check_labels(labels: Any, ids: Any, documents: Any) -> None:
    """Raise ValueError if the label of a document's last token is the first token of the next. Skip documents that all begin
    with one token, which may be the one that ends each."""
    if labels is None or ids is None or documents is None:
        return
    last = (documents[:, :-1] != documents[:, 1:]) & (documents[:, :-1] >= 0) & (documents[:, 1:] >= 0)
    following, found = ids[:, 1:][last], labels[:, :-1][last]
    if (following[1:] != following[:-1]).any() and (found == following).all():
        row, index = (int(i[0]) for i in last.nonzero())
        raise ValueError(
            f"the label of token {index} of row {row}, the last of its document, is the first token of the next document, and so "
            "at every other end: give the last token of each document the label ignore_index, or leave labels out"
        )


def mark_mismatches(extents: Any, tokens: Any, tree: bool) -> Any:
    """Return bool [rows, tokens]: True if a nonempty extent is impossible at its token. Extents ``tree`` contain it; those of
    causal queries begin at or before it."""
    first, end = extents[..., 0], extents[..., 1]
    outside = first > tokens
    if tree:
        outside = outside | (end <= tokens)
    return (first < end) & outside


def check_extents_match_layout(extents: Any, tokens: Any, tree: bool) -> None:
    wrong = mark_mismatches(extents, tokens, tree)
    if not wrong.any():
        return
    row, index = (int(i) for i in next(zip(*wrong.nonzero(), strict=True)))
    held = [int(x) for x in extents[row, index]]
    where = f"of row {row}, position {int(tokens[index])} is {held}"
    if tree:
        raise ValueError(
            f"the key extent {where}, and a token of a tree lies inside its own: {AGAIN}. Only a tree has a longest_path"
        )
    raise ValueError(
        f"the extent {where}, so the query sees no key under a causal mask: {AGAIN}. A query that shall see no key has the "
        "extent [0, 0)"
    )
