"""Prefix trees: sequences whose shared prefixes are stored once, as segments in depth-first order.

A prompt of 4 tokens with two completions, the second of which forks again:

    segment      0          1        2     3      4           parents   -1 0 0 2 2
    tokens       0 1 2 3    4 5 6    7     8 9    10          lengths    4 3 1 2 1
    end         11         7        11    10      11          the end of the segment's subtree, exclusive
    position     0 1 2 3    4 5 6    4     5 6    5           the *path position*, counted along the path from the root

A token sees itself and its ancestors. In depth-first order a subtree is an interval, so the queries that see key j are those of
the interval [j, end), the *key extent* of key j.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from ..lazy_numpy import np
from ..runs import Band
from ..validation import in_words, is_integer, is_traced, number_in_words

MAX_TOKENS = 2**31 - 1
"""The largest number of tokens of a row: int32 holds their positions and the ends of subtrees."""


class TreeExtents(NamedTuple):
    """The key extents and path positions of rows that hold one or several prefix trees. Shorter rows are padded with 0."""

    key_extents: Any
    """int32 [rows, tokens, 2]: first and end (exclusive) position of the queries that may see each key; [0, 0) in padding."""
    positions: Any
    """int32 [rows, tokens]: the position of each token on its path from the root, for rotary embeddings."""


class Tree(NamedTuple):
    """The segments of one row in depth-first order. A parent of -1 marks a root."""

    parents: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def pairs(self) -> int:
        """Return the pairs of a query and a key that it sees: itself and its ancestors."""
        return sum(n * depth + n * (n + 1) // 2 for n, depth in zip(self.lengths, self.depths(), strict=True))

    def depths(self) -> list[int]:
        """Return, for each segment, the position of its first token along the path from the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + self.lengths[parent])
        return depths

    def ends(self) -> list[int]:
        """Return the end (exclusive) of each segment's subtree, as an index of a token in the row."""
        ends = list(accumulate(self.lengths))
        for segment in reversed(range(len(ends))):
            parent = self.parents[segment]
            if parent >= 0:
                ends[parent] = max(ends[parent], ends[segment])
        return ends


def tree_extents(parents: Any, lengths: Any, tokens: int | None = None) -> TreeExtents:
    """Return numpy arrays of each token's key extent and its position on the path from the root.

    A token's key extent is the range of queries that may see it. ``parents``, ``lengths``: prefix trees as in :func:`trees_of`.

    ``tokens``: number of tokens of a row in the arrays, by default that of the longest row. Raise ValueError if a row has more.
    """
    trees = trees_of(parents, lengths)
    longest = max(tree.tokens for tree in trees)
    width = longest if tokens is None else tokens
    if longest > width:
        raise ValueError(
            f"a row of the tree has {longest} tokens, and ids have {width}: lengths count the tokens of each segment"
        )
    key_extents, positions = np.zeros((len(trees), width, 2), np.int32), np.zeros((len(trees), width), np.int32)
    for row, tree in enumerate(trees):
        own = np.arange(tree.tokens)
        starts = np.cumsum(tree.lengths) - tree.lengths
        key_extents[row, : len(own), 0] = own
        key_extents[row, : len(own), 1] = np.repeat(tree.ends(), tree.lengths)
        positions[row, : len(own)] = own + np.repeat(np.asarray(tree.depths()) - starts, tree.lengths)
    return TreeExtents(key_extents, positions)


def batch_of_trees(tree: Any, batch: int, tokens: int) -> tuple[Any, Any, Any]:
    """Return each token's key extent [batch, tokens, 2], path position [batch, tokens] and segment index [batch, tokens].
    All are int32 numpy arrays; the segment index is -1 in padding. ``tree``: (parents, lengths) for all rows, or for one if all
    are alike."""
    pair = _as_sequence(tree)
    if pair is None or len(pair) != 2:
        raise ValueError(
            f"tree must be a pair (parents, lengths), as tree_extents takes them and rollouts.tree is, got {in_words(tree)}"
        )
    parents, lengths = pair
    extents, trees = tree_extents(parents, lengths, tokens), trees_of(parents, lengths)
    if len(trees) not in (1, batch):
        raise ValueError(f"tree has {len(trees)} rows and ids have {batch}: pass one tree for every row, or one for all")
    segments = np.full((len(trees), tokens), -1, np.int32)
    for row, each in enumerate(trees):
        segments[row, : each.tokens] = np.repeat(np.arange(len(each.lengths)), each.lengths)
    spread = lambda x: np.broadcast_to(x, (batch, *x.shape[1:])).copy()
    return spread(extents.key_extents), spread(extents.positions), spread(segments)


def longest_path(trees: Iterable[Tree]) -> int:
    """Return the tokens on the longest path from a root; a window of as many, along the path, hides no ancestor."""
    return max(depth + length for tree in trees for depth, length in zip(tree.depths(), tree.lengths, strict=True))


def tree_objection(mask: Band, key_extents: bool, longest: Any, alibi: bool, path_positions: bool) -> str | None:
    """Return the reason why a layer cannot attend over the key extents of a tree, or None if it can.
    The layer replaces ``mask`` by :func:`causal`, so a mask that hides an ancestor is a reason. ``longest``: tokens of the
    longest path, if passed. ``path_positions``: False if the layer has a rotary embedding and no positions were passed."""
    if longest is None:
        counting = "ALiBi slopes" if alibi else "a window" if mask.hi is not None or (mask.lo or 0) > 0 else None
        if not key_extents or counting is None:
            return None
        return (
            f"key_extents came to a layer with {counting}, which counts positions of the row, not of a tree's path: pass "
            "longest_path=shard.longest_path beside them, and a window that hides nothing on any path is left out. If they are "
            "not a tree's, call ring_attention, or pass extents"
        )
    if not key_extents:
        return "longest_path came without key_extents, the tree that it is about: pass both from shard_batch(..., tree=...)"
    if not is_integer(longest) or is_traced(longest) or longest < 1:
        return f"longest_path must be an int of at least 1, the tokens of the longest path, got {in_words(longest)}"
    if alibi:
        return (
            "a tree came to a layer with ALiBi slopes, which count positions of the row, not of the path: use a rotary embedding"
        )
    if not path_positions:
        return "a tree came without positions, which count along the path from the root: pass positions=shard.positions"
    if mask.lo != 0:
        return f"a tree goes with causal layers, and this layer has mask={mask}: make it with mask=causal() or a window before"
    if mask.hi is not None and mask.hi + 1 < longest:
        return (
            f"a tree came to a layer with a window of {mask.hi + 1} tokens, itself included, which counts positions of the row, "
            f"and its longest path has {longest}: a window that long hides nothing on any path; pass shorter rollouts"
        )
    return None


def trees_of(parents: Any, lengths: Any) -> tuple[Tree, ...]:
    """Return the tree of each row, for lists of ints or lists of such lists, in depth-first order; a parent of -1 is a root."""
    rows = _rows("parents", parents), _rows("lengths", lengths)
    if len(rows[0]) != len(rows[1]):
        raise ValueError(f"parents have {len(rows[0])} rows and lengths {len(rows[1])}: pass both for every row of the batch")
    trees = tuple(Tree(*pair) for pair in zip(*rows, strict=True))
    for row, tree in enumerate(trees):
        _check(f"row {row}", tree)
    return trees


def _check(row: str, tree: Tree) -> None:
    if not tree.parents:
        raise ValueError(f"{row} of the tree has no segment: a row holds at least one, parents=[-1]")
    if len(tree.parents) != len(tree.lengths):
        raise ValueError(
            f"{row} of the tree has {len(tree.parents)} parents and {len(tree.lengths)} lengths: pass one per segment"
        )
    if tree.tokens > MAX_TOKENS:
        raise ValueError(
            f"{row} of the tree has {tree.tokens} tokens, and positions are int32: pass at most {MAX_TOKENS} in a row"
        )
    path: list[int] = []  # the segment before this one, and its ancestors
    for segment, (parent, length) in enumerate(zip(*tree, strict=True)):
        where = f"{row}, segment {segment}"
        if length < 1:
            raise ValueError(f"{where} has {length} tokens: leave out an empty segment and let its children name its parent")
        if not -1 <= parent < segment:
            raise ValueError(
                f"{where} has the parent {parent}: a parent comes before its children, so name one of the segments 0 to "
                f"{segment - 1}, or -1 for a root"
                if segment
                else f"{where} has the parent {parent}: the first segment is a root, with the parent -1"
            )
        while path and path[-1] != parent:
            path.pop()
        if parent >= 0 and not path:
            raise ValueError(
                f"{where} has the parent {parent}, whose subtree ended before: order segments depth-first, each subtree in one "
                "piece"
            )
        path.append(segment)


def _rows(name: str, values: Any) -> list[tuple[int, ...]]:
    """Return ``values`` as rows of integers. Raise ValueError if they are neither a list of integers nor a list of such lists."""
    outer = _as_sequence(values)
    nested = [_as_sequence(x) for x in outer or ()]
    rows = nested if nested and all(x is not None for x in nested) else [outer]
    for row in rows:
        wrong = [values] if row is None else [x for x in row if not is_integer(x) or is_traced(x)]
        if wrong:
            raise ValueError(
                f"{name} must be a list of ints, one for each segment of a row, or a list of such lists, got "
                f"{in_words(wrong[0]) if wrong[0] is not values else number_in_words(values)}"
            )
    return [tuple(map(int, row or ())) for row in rows]


def _as_sequence(x: Any) -> Sequence[Any] | None:
    """Return a list, tuple or array as a sequence. Return None for a 0-d or traced array and for anything else."""
    if isinstance(x, list | tuple):
        return x
    return x.tolist() if hasattr(x, "tolist") and getattr(x, "shape", ()) and not is_traced(x) else None
