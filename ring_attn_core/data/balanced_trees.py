"""The balanced layout of prefix trees: it gives all ranks about equal work, and keeps subtrees on one rank if it can.

Prompts of 6, 4 and 8 tokens (A, D, G), each with two completions, over 4 ranks of 8 tokens:

    segment    A A A A A A B B C C D D D D E E F F G G G G G G G G H H H I I I
    rank       1 1 1 1 1 2 2 2 2 2 0 0 0 0 0 3 3 2 2 2 3 3 3 3 3 3 1 1 1 0 0 0

                 visible pairs of a rank's queries     keys that a rank reads from other ranks
                     rank 0   1   2   3                    rank 0   1   2   3
    balanced             45  45  45  44                         8   8  10   7
    zigzag               51  60  36  32                        10  10   8   2
    contiguous           36  36  32  75                         0   6   4   6

A query costs one visible (query, key) pair for each token on its path from the root, itself included. Only the tokens of a
subtree see the subtree's keys. So each subtree that fits into a shard is one *item*, which one rank holds if possible. A larger
subtree is divided into its first segment and the subtrees below. ``plan/balanced.py`` assigns items to ranks, as it assigns
documents. It expects the cost of a query to rise within an item. The cost does rise within a segment, but not always within a
subtree. If the largest cost of a rank then exceeds the mean by more than 1 %, a second layout is made, with each segment as an
item, and the more even of the two layouts is returned.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

from ..layouts import check_length, check_ranks
from ..plan.balanced import RankWork
from ..plan.balanced_layout import BalancedLayout
from ..plan.dealing import deal, join_items
from ..runs import Run
from .trees import Tree, trees_of

MAX_UNEVEN = 1.01
"""The largest ratio of a rank's cost to the mean cost that is accepted without making a second layout."""

Runs = tuple[tuple[tuple[int, int], ...], ...]


def balanced_tree_layout(parents: Any, lengths: Any, ranks: int, *, length: int | None = None) -> BalancedLayout:
    """Return a layout that gives each rank equally many tokens of prefix trees, about equal cost, and few keys from other ranks.

    The cost of a rank is its number of visible pairs in all rows together. The costs differ by at most about 1 %, or by more if
    a rank has fewer than 100 tokens.

    ``parents``, ``lengths``: as in :func:`tree_extents`, for one row or for each row of a batch.
    ``length``: number of tokens of a row, padding included; None: the tokens of the longest row.

    The result depends on the arguments alone, so each rank can compute it. On one CPU it took 0.4 ms for 8 ranks and 17 segments,
    and 10 ms for 64 ranks, 1,025 segments and a million tokens. Raise ValueError if an argument is invalid, or a row has more
    than ``length`` tokens.
    """
    check_ranks(ranks)
    trees = trees_of(parents, lengths)
    longest = max(tree.tokens for tree in trees)
    tokens = longest if length is None else length
    check_length(tokens)
    if longest > tokens:
        raise ValueError(f"a row of the tree has {longest} tokens, and length is {tokens}: pass the tokens of the batch's rows")
    local = -(-tokens // ranks)
    rows = [_cost_before(tree) for tree in trees]
    before = rows[0] if len(rows) == 1 else lambda position: sum(row(position) for row in rows)
    subtrees, segments = (_edges(trees, most, ranks * local) for most in (local, 1))
    dealt = deal(join_items(subtrees, local), segments, ranks, before)
    if _balance(dealt, before) > MAX_UNEVEN:
        dealt = min(dealt, deal(segments, segments, ranks, before), key=lambda each: _balance(each, before))
    return BalancedLayout(dealt, tokens, tree=True)


def tree_work(tree: Tree, runs: tuple[Run, ...]) -> RankWork:
    """Return the visible pairs of a rank that holds ``runs`` of a tree, and the keys that it reads from other ranks."""
    pairs, remote, begin = 0, 0, 0
    for length, depth, reach in zip(tree.lengths, tree.depths(), tree.ends(), strict=True):
        end, newest = begin + length, -1
        for run in runs:
            first, count, below = run.before(begin).length, run.before(end).length, run.before(reach).length
            count -= first
            pairs += count * (run.start + run.stride * first - begin + depth + 1) + run.stride * count * (count - 1) // 2
            newest = max(newest, run.start + run.stride * (below - 1)) if below else newest
        seen = min(newest + 1, end)  # keys from begin to here are seen by a query of this rank
        own = sum(run.before(seen).length - run.before(begin).length for run in runs)
        remote += max(seen - begin - own, 0)
        begin = end
    return RankWork(pairs, remote)


def _edges(trees: Iterable[Tree], most: int, tokens: int) -> list[int]:
    """Return, ascending, all positions from 0 to ``tokens`` at which an item begins or ends in at least one row.
    An item is a subtree of at most ``most`` tokens, or the first segment of a larger subtree."""
    found = {0, tokens}
    for tree in trees:
        starts, ends = list(accumulate(tree.lengths, initial=0)), tree.ends()
        segment = 0
        while segment < len(ends):
            whole = ends[segment] - starts[segment] <= most
            found.add(ends[segment] if whole else starts[segment + 1])
            segment = bisect_left(starts, ends[segment]) if whole else segment + 1
    return sorted(found)


def _cost_before(tree: Tree) -> Callable[[int], int]:
    """Return a function that maps a position to the number of visible pairs of all queries before it."""
    starts, depths = list(accumulate(tree.lengths, initial=0)), [*tree.depths(), 0]
    pairs = lambda depth, queries: queries * depth + queries * (queries + 1) // 2
    totals = list(accumulate(map(pairs, depths, tree.lengths), initial=0))

    def before(position: int) -> int:
        at = bisect_right(starts, position) - 1
        return totals[at] + pairs(depths[at], min(position, starts[-1]) - starts[at])

    return before


def _balance(dealt: Runs, cost_before: Callable[[int], float]) -> float:
    """Return the largest cost of a rank over the mean. ``cost_before``: maps a position to the cost of all queries before it."""
    costs = [sum(cost_before(start + length) - cost_before(start) for start, length in rank) for rank in dealt]
    return max(costs) * len(costs) / max(sum(costs), 1)
