"""Rollouts: token lists that share prefixes, packed into rows as prefix trees with labels and weights.

Two completions of the prompt a b c, in two rollouts "a b c d e" and "a b c f"; x means no label:

    rollouts   a b c d e    a b c f           row       a b   c d e   c f        segments: the prompt, and each completion
    labels     b c d e x    b c f x           labels    b c   d e x   f x        parents -1 0 0, lengths 2 3 2
    weights    1 1 1 1 0    1 1 1 0           weights   2 2   1 1 0   1 0        the sum of both rollouts

The label of a token is the next token. The label of c differs between the two rollouts. So c is stored as the first token of
each completion instead of the last token of the prompt. Two tokens can share a slot (one index of a row) if they, their prefixes
and their labels are equal. The last token of a rollout has no label, so it can share a slot with a token of any label.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..layouts import gathered_length
from ..lazy_numpy import np
from ..validation import in_words, is_integer
from .trees import Tree, longest_path, tree_extents

NO_LABEL = -100
"""The label of a token without a target; the losses ignore it by default (``ignore_index``)."""


@dataclass(frozen=True, eq=False)
class Rollouts:
    """Rollouts packed into rows by ``pack_rollouts``. Each row holds one or several prefix trees.

    Slots after the last segment of a row are padding, with id 0, no label, weight 0 and position 0.
    """

    ids: Any
    """int [rows, tokens]: token ids."""
    labels: Any
    """int [rows, tokens]: the target of each token, already shifted; -100 if no rollout counts the target in the loss."""
    label_weights: Any
    """float32 [rows, tokens]: the sum of the weights that the rollouts give the label; 0 without a label."""
    positions: Any
    """int32 [rows, tokens]: the position of each token in its rollouts, for rotary embeddings."""
    predictors: Any
    """int [sum of counts]: for each predicted token of each rollout, the flat slot (row * tokens + index) of the token before."""
    counts: tuple[int, ...]
    """Number of predicted tokens of each rollout: all its tokens but the first."""
    parents: tuple[tuple[int, ...], ...]
    """The parent of each segment of each row; -1 for a root."""
    lengths: tuple[tuple[int, ...], ...]
    """The number of tokens of each segment of each row."""

    @property
    def tree(self) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
        """Return the pair (``parents``, ``lengths``), which ``shard_batch`` takes as its argument ``tree``."""
        return self.parents, self.lengths

    @property
    def saved_tokens(self) -> int:
        """Return the number of tokens that sharing saves: tokens of all rollouts minus tokens of all segments."""
        return sum(self.counts) + len(self.counts) - sum(map(sum, self.lengths))

    @property
    def pairs(self) -> tuple[int, ...]:
        """Return the visible (query, key) pairs of each row under a causal mask, for :func:`plan_batches`."""
        return tuple(each.pairs for each in map(Tree, *self.tree))

    @property
    def longest_path(self) -> int:
        """Return the number of tokens in the longest rollout."""
        return longest_path(map(Tree, *self.tree))


class _Row:
    """A row to which rollouts are added in lexicographic order, so that the last one shares the longest prefix with the next."""

    def __init__(self) -> None:
        self.size = 0
        self.path = np.zeros(0, np.int64)
        """The slot of each token of the last rollout."""
        self.last = np.zeros(0, np.int64)
        """The tokens of the last rollout."""
        self.parents: list[np.ndarray] = []
        """For each added rollout an array: the parent slot of each slot that the rollout added, -1 for a root."""

    def shared(self, tokens: np.ndarray) -> int:
        """Return the number of slots that a rollout with these tokens would share with the last added rollout."""
        most = min(len(self.last), len(tokens))
        differ = np.flatnonzero(self.last[:most] != tokens[:most])
        if not len(differ):
            return most
        return max(int(differ[0]) - 1, 0)  # the labels of the last equal token differ

    def add(self, tokens: np.ndarray) -> np.ndarray:
        shared = self.shared(tokens)
        new = np.arange(self.size, self.size + len(tokens) - shared)
        path = np.concatenate([self.path[:shared], new])
        self.parents.append(np.concatenate([[-1], path])[shared:-1])
        self.size, self.path, self.last = self.size + len(new), path, tokens
        return path

    def tree(self) -> Tree:
        """Return the row's segments. A segment is a chain of slots that ends only at a leaf or a fork of the tree."""
        parents = np.concatenate(self.parents)
        children = np.bincount(parents + 1, minlength=self.size + 1)[1:]
        before = np.arange(self.size) - 1
        starts = np.flatnonzero((parents < 0) | (parents != before) | (children[parents] > 1))
        above = np.where(parents[starts] < 0, -1, np.searchsorted(starts, parents[starts], side="right") - 1)
        return Tree(tuple(above.tolist()), tuple(np.diff(starts, append=self.size).tolist()))


def pack_rollouts(rollouts: Any, loss_masks: Any = None, weights: Any = None, length: int | None = None) -> Rollouts:
    """Pack rollouts (token lists) into rows of at most ``length`` tokens, or into one row if ``length`` is None.

    The result holds numpy arrays. ``pack_rollouts`` of ring_attn_jax documents the other arguments and the errors, and so does
    that of ring_attn_torch.
    """
    if length is not None and (not is_integer(length) or length < 1):
        raise ValueError(f"length is the largest number of tokens of a row, an int of at least 1, got {in_words(length)}")
    lists = _check_rollouts(rollouts, length)
    values = _values("weights", weights, lists, "a number, or a list with the weight of each token")
    masks = _values("loss_masks", loss_masks, lists, "a list with True for each token that counts")
    for i, mask in enumerate(masks):
        if ((mask != 0) & (mask != 1)).any():
            raise ValueError(f"loss_masks[{i}] must hold True or False, 1 or 0, for each token: pass other factors as weights")
    placed, rows = _place(lists, length)
    ids = np.zeros((len(rows), max(row.size for row in rows)), np.int32)
    labels, sums = np.full_like(ids, NO_LABEL), np.zeros(ids.shape, np.float64)
    for tokens, (row, path), mask, weight in zip(lists, placed, masks, values, strict=True):
        ids[row, path] = tokens
        counted = np.flatnonzero(mask[1:])
        labels[row, path[counted]] = tokens[1:][counted]
        sums[row, path[counted]] += weight[1:][counted]
    most = np.abs(sums).max()
    if most > np.finfo(np.float32).max:
        raise ValueError(
            f"weights of shared tokens add up to {most:.3g}, which float32 cannot hold: divide all weights by a number"
        )
    trees = [row.tree() for row in rows]
    parents, lengths = (tuple(each) for each in zip(*trees, strict=True))
    predictors = np.concatenate([row * ids.shape[1] + path[:-1] for row, path in placed]).astype(np.int32)
    counts = tuple(len(tokens) - 1 for tokens in lists)
    positions = tree_extents(parents, lengths).positions
    return Rollouts(ids, labels, sums.astype(np.float32), positions, predictors, counts, parents, lengths)


def check_values(shape: tuple[int, ...], rollouts: Any, layout: Any, ranks: int) -> None:
    """Raise ValueError if [rows, tokens, ...] does not fit the rows of ``rollouts``. ``layout``: of its shards; None: whole."""
    if not isinstance(rollouts, Rollouts):
        raise ValueError(f"rollouts must be the result of pack_rollouts, got {in_words(rollouts)}")
    rows, tokens = rollouts.ids.shape
    if len(shape) < 2 or shape[0] != rows or (layout is None and shape[1] != tokens):
        raise ValueError(
            f"values must be [{rows}, {tokens}, ...], one for each token of the rollouts' rows, got {list(shape)}: pass layout= "
            "for this rank's shard, and pack_rollouts' own result for these rows"
        )
    if layout is not None:
        gathered_length(shape, layout, ranks, tokens)


def _place(lists: list[np.ndarray], length: int | None) -> tuple[list[tuple[int, np.ndarray]], list[_Row]]:
    """Return each rollout's row and slots, and all rows. It goes to the first row to which it adds the fewest tokens."""
    rows: list[_Row] = []
    placed: list[Any] = [None] * len(lists)
    for i in sorted(range(len(lists)), key=lambda i: lists[i].astype(">u4").tobytes()):
        tokens = lists[i]
        added = [len(tokens) - row.shared(tokens) for row in rows]
        fitting = [at for at, row in enumerate(rows) if length is None or row.size + added[at] <= length]
        at = min(fitting, key=lambda at: added[at], default=len(rows))
        if at == len(rows):
            rows.append(_Row())
        placed[i] = at, rows[at].add(tokens)
    return placed, rows


def _check_rollouts(rollouts: Any, length: int | None) -> list[np.ndarray]:
    """Return each rollout's tokens as an int64 array. Raise ValueError if a rollout is not a list of token ids or is too long."""
    listed = list(rollouts) if isinstance(rollouts, Iterable) and not isinstance(rollouts, str | dict) else None
    if not listed:
        raise ValueError(f"rollouts must be a list of token lists, at least one, got {in_words(rollouts)}")
    lists = []
    for i, tokens in enumerate(listed):
        array = _array(tokens)
        if array is not None and array.ndim == 1 and not array.size:
            raise ValueError(f"rollouts[{i}] is empty: a rollout has at least one token, leave it out")
        if array is None or array.ndim != 1 or array.dtype.kind not in "iu":
            got = in_words(tokens) if array is None or not array.ndim else _short(array)
            raise ValueError(f"rollouts[{i}] must be a list of token ids, got {got}")
        wrong = array[(array < 0) | (array > np.iinfo(np.int32).max)]
        if wrong.size:
            raise ValueError(f"rollouts[{i}] holds {wrong[0]}: token ids are at least 0 and fit int32, leave padding out")
        if length is not None and array.size > length:
            raise ValueError(
                f"rollouts[{i}] has {array.size} tokens, and a row at most length={length}: pass length={array.size} or more, or "
                "shorten the rollout"
            )
        lists.append(array.astype(np.int64))
    return lists


def _values(name: str, values: Any, lists: list[np.ndarray], what: str) -> list[np.ndarray]:
    """Return ``values`` as float64 arrays by rollout; None: 1. Unless ``name`` is "loss_masks" a number stands for an array."""
    each = [1.0] * len(lists) if values is None else values
    each = list(each) if isinstance(each, Iterable) and not isinstance(each, str | dict) else None
    if each is None or len(each) != len(lists):
        got = in_words(values) if each is None else str(len(each))
        raise ValueError(f"{name} must be a list with one entry for each of the {len(lists)} rollouts, got {got}")
    arrays = []
    for i, (x, tokens) in enumerate(zip(each, lists, strict=True)):
        if getattr(x, "requires_grad", False):
            raise ValueError(f"{name}[{i}] requires a gradient, and weights are constants: pass {name}[{i}].detach()")
        array = _array(x)
        shapes = [tokens.shape] if name == "loss_masks" and values is not None else [tokens.shape, ()]
        if array is None or array.dtype.kind not in "biuf" or array.shape not in shapes:
            raise ValueError(
                f"{name}[{i}] must be {what}, {len(tokens)} here, got {in_words(x) if array is None else _short(array)}"
            )
        if not np.isfinite(array).all():
            raise ValueError(f"{name}[{i}] holds a number that is not finite: a weight of 0 leaves a token out of the sum")
        arrays.append(np.broadcast_to(array.astype(np.float64), tokens.shape))
    return arrays


def _array(x: Any) -> np.ndarray | None:
    """Return ``x`` as a numpy array, or None if it cannot be converted. Numbers of bfloat16 become float64."""
    try:
        return np.asarray(x.tolist() if str(getattr(x, "dtype", "")).endswith("bfloat16") else x)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _short(array: np.ndarray) -> str:
    return f"{array.dtype} {list(array.shape)}"
