"""The check that the shards of all ranks hold the same prefix trees.

A rank holds path positions and key extents (trees.py explains both) of its own tokens only. So no rank can compare its tree with
the tree of another rank. Instead each rank describes its shard by spans, and every rank joins the spans of all ranks into global
rows. These rows are trees if and only if each subtree ends inside the subtree of its parent, and the path position of each token
is the number of its ancestors:

    token      0 1   2 3   4 5   6         a prompt of 2 tokens, and completions of 2 and 3
    rank       0 0   1 1   0 0   1         the rank that holds the token
    end        7 7   4 4   7 7   7         the end of the token's subtree, exclusive
    position   0 1   2 3   2 3   4         the path position

A span describes tokens of a row that are ``step`` apart and whose subtrees have the same end: (row, first token, step, number of
tokens, end, position of the first token). Here rank 0 describes its shard by (0, 0, 1, 2, 7, 0) and (0, 4, 1, 2, 7, 2).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..lazy_numpy import np

Span = Sequence[int]
"""(row, first token, step, number of tokens, end, path position of the first token). Tokens and positions advance by step."""

AGAIN = "pass the same tree to shard_batch on every rank, and its key_extents and positions unchanged to the model"


def spans_of(key_extents: Any, positions: Any, tokens: Any) -> list[Span]:
    """Return the spans of a shard without padding, by key extents [rows, tokens, 2]. ``tokens``: indices in the global row."""
    spans: list[Span] = []
    for row, (extents, places) in enumerate(zip(key_extents, positions, strict=True)):
        visible = extents[:, 0] < extents[:, 1]
        own, (firsts, ends), places = tokens[visible], extents[visible].T, places[visible]
        for token, first in zip(own[firsts > own][:1], firsts[firsts > own][:1], strict=True):
            raise ValueError(
                f"the key extent of row {row}, position {token} begins at {first}, and a token of a tree sees itself: pass "
                "layout=shard.layout and key_extents=shard.key_extents of shard_batch(..., tree=...); "
                "only a tree has a longest_path"
            )
        if not len(own):
            continue
        step = max(int(np.diff(own).min()), 1) if len(own) > 1 else 1
        breaks = (np.diff(own) != step) | (np.diff(places) != step) | (np.diff(ends) != 0)
        starts = np.flatnonzero(np.concatenate([[True], breaks]))
        counts = np.diff([*starts, len(own)])
        columns = own[starts], np.full_like(starts, step), counts, ends[starts], places[starts]
        spans += [(row, *map(int, each)) for each in zip(*columns, strict=True)]
    return spans


def check_one_tree(spans: Iterable[Sequence[Span]], longest: int, counted: bool) -> None:
    """Raise ValueError if the spans of all ranks form no trees with paths of at most ``longest``. ``counted``: with positions."""
    tokens: dict[int, list[Any]] = {}
    for rank, each in enumerate(spans):
        for row, first, step, count, end, position in each:
            own = np.arange(count) * step
            tokens.setdefault(row, []).append((first + own, np.full_like(own, end), position + own, np.full_like(own, rank)))
    for row, parts in sorted(tokens.items()):
        columns = [np.concatenate(x) for x in zip(*parts, strict=True)]
        order = np.argsort(columns[0], kind="stable")
        tokens_of_row, ends, positions, ranks = (x[order] for x in columns)
        _check_row(row, tokens_of_row, ends, positions if counted else None, ranks, longest)


def _check_row(row: int, tokens: Any, ends: Any, positions: Any, ranks: Any, longest: int) -> None:
    """Raise ValueError if a row is not a tree, or has a path of more than ``longest`` tokens. By token, in order of ``tokens``:
    the ``ends`` of its subtree, its path position (or None) and its rank."""
    breaks = (np.diff(tokens) != 1) | (np.diff(ends) != 0)
    if positions is not None:
        breaks |= np.diff(positions) != 1
    starts = [0, *(np.flatnonzero(breaks) + 1).tolist()]
    path: list[tuple[int, int, int]] = []  # of the subtrees that hold this span: end, tokens on the path before it, rank
    for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True):
        token, end, rank = (int(x[start]) for x in (tokens, ends, ranks))
        where = f"the ranks of this ring hold shards of different trees: in row {row} position {token} (rank {rank})"
        while path and path[-1][0] <= token:
            path.pop()
        if path and path[-1][0] < end:
            raise ValueError(
                f"{where} has a subtree that ends at {end}, and lies inside one that ends at {path[-1][0]} (rank {path[-1][2]}): "
                f"{AGAIN}"
            )
        if end > tokens[-1] + 1:
            raise ValueError(f"{where} has a subtree that ends at {end}, and the row has {int(tokens[-1]) + 1} tokens: {AGAIN}")
        depth = path[-1][1] if path else 0
        if positions is not None and positions[start] != depth:
            raise ValueError(f"{where} has {depth} ancestors by its key extents, and positions say {positions[start]}: {AGAIN}")
        if depth + stop - start > longest:
            raise ValueError(
                f"a path in row {row} has {depth + stop - start} tokens at position {int(tokens[stop - 1])}, and longest_path is "
                f"{longest}: pass longest_path=shard.longest_path"
            )
        path.append((end, depth + stop - start, rank))
