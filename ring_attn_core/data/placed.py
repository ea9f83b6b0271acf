"""The check that each token of a shard is at a position that its extent allows. The check finds calls with a wrong layout.

A query sees keys of its own document, so under a causal mask the extent of a query begins at or before the query. An example:
documents of 3 and 5 tokens are sharded over 2 ranks in a balanced layout, but the call says that the layout is zigzag:

    rank 0 holds      0  1  2  3         rank 1 holds      4  5  6  7
    extents begin     0  0  0  3         extents begin     3  3  3  3
    zigzag says       0  1  6  7         zigzag says       2  3  4  5        an extent begins at 3, its query would be at 2

The check does not notice if tokens of one document exchange their positions. If tokens of a prefix tree exchange theirs, at least
one rank notices, because the key extent of a token begins at the token.
"""

from __future__ import annotations

from typing import Any

AGAIN = (
    "pass the layout by which these tokens were sharded, layout=shard.layout for a balanced one, and the shard's arrays unchanged"
)


def misplaced(extents: Any, tokens: Any, of_tree: bool) -> Any:
    """Return bool [rows, tokens]: True if a token's extent is impossible at the token's position. Empty extents give False.

    ``extents`` [rows, tokens, 2] and ``tokens``, the positions [tokens] or [rows, tokens], are arrays of any framework.
    ``of_tree``: True if ``extents`` are the key extents of a tree: each must contain its token. False if they are the extents of
    causal queries: each must begin at or before its query.
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
