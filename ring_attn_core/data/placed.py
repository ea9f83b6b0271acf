"""The check that each token of a shard is at a position that its extent allows. It finds calls with a wrong layout.

A query sees keys of its own document, so under a causal mask the extent of a query begins at or before the query. Documents of 3
and 5 tokens, dealt to 2 ranks in a balanced layout, and taken for zigzag:

    rank 0 holds      0  1  2  3         rank 1 holds      4  5  6  7
    extents begin     0  0  0  3         extents begin     3  3  3  3
    zigzag says       0  1  6  7         zigzag says       2  3  4  5        an extent begins at 3, its query would be at 2

If tokens of one document have exchanged their positions, the check does not notice it. In a prefix tree the key extent of a token
begins at the token, so some rank notices every exchange.
"""

from __future__ import annotations

from typing import Any

AGAIN = (
    "pass the layout by which these tokens were sharded, layout=shard.layout for a balanced one, and the shard's arrays unchanged"
)


def misplaced(extents: Any, tokens: Any, of_tree: bool) -> Any:
    """Return a bool array [rows, tokens], True if the extent of a token is impossible at its position; False for empty extents.

    ``extents`` [rows, tokens, 2], ``tokens`` (positions) [tokens] or [rows, tokens]: arrays of any framework. ``of_tree``: True
    for the key extents of a tree, each of which contains its token; False for the extents of causal queries, each of which begins
    at or before its query.
    """
    first, end = extents[..., 0], extents[..., 1]
    outside = first > tokens
    if of_tree:
        outside = outside | (end <= tokens)
    return (first < end) & outside


def check_placed(extents: Any, tokens: Any, of_tree: bool) -> None:
    """Raise ValueError if :func:`misplaced` is True for a token.

    ``extents``, ``tokens`` [tokens], ``of_tree``: the arguments of :func:`misplaced`, as NumPy arrays.
    """
    wrong = misplaced(extents, tokens, of_tree)
    if not wrong.any():
        return
    row, index = (int(i) for i in next(zip(*wrong.nonzero(), strict=True)))
    held = [int(x) for x in extents[row, index]]
    where = f"of row {row}, position {int(tokens[index])} is {held}"
    if of_tree:
        raise ValueError(
            f"the key extent {where}, and a token of a tree lies inside its own: {AGAIN}. Only a tree has a longest_path"
        )
    raise ValueError(
        f"the extent {where}, so the query sees no key under a causal mask: {AGAIN}. A query that shall see no key has the "
        "extent [0, 0)"
    )
