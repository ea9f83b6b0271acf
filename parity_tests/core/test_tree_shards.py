"""The shards of all ranks are those of one tree, or the error says where they differ."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from ring_attn_core.data.tree_shards import check_one_tree, spans_of
from ring_attn_core.data.trees import batch_of_trees, longest_path, trees_of
from ring_attn_core.layouts import LAYOUTS
from ring_attn_core.runs import Run

from ..support.rollouts import drawn_tree

SLOTS = 24


def tree_of(seed: int) -> Any:
    """A tree of at most SLOTS tokens."""
    rng = np.random.default_rng(seed)
    while True:
        tree = drawn_tree(rng, 1 + seed % 6)
        if sum(tree[1]) <= SLOTS:
            return tree


def own(layout: str, ranks: int, rank: int) -> np.ndarray:
    runs: tuple[Run, ...] = LAYOUTS[layout](rank, ranks, SLOTS // ranks)
    return np.concatenate([run.start + run.stride * np.arange(run.length) for run in runs])


def arrays_of(tree: Any, batch: int = 1) -> tuple[Any, Any]:
    key_extents, positions, _ = batch_of_trees(tree, batch, SLOTS)
    return key_extents, positions


def spans(arrays: tuple[Any, Any], mine: np.ndarray) -> list[Any]:
    key_extents, positions = arrays
    return spans_of(key_extents[:, mine], positions[:, mine], mine)


def longest(*trees: Any) -> int:
    return max(longest_path(trees_of(*tree)) for tree in trees)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_of_any_tree_are_one_tree(layout: str, ranks: int):
    for seed in range(20):
        tree = tree_of(seed)
        every = [spans(arrays_of(tree, 2), own(layout, ranks, rank)) for rank in range(ranks)]
        check_one_tree(every, longest(tree), True)
        most = longest(tree)
        with pytest.raises(ValueError, match=f"has {most} tokens at position .*, and longest_path is {most - 1}"):
            check_one_tree(every, most - 1, True)


def is_one_tree(key_extents: np.ndarray, positions: np.ndarray) -> bool:
    """Brute force over all pairs: subtrees lie in the row and are nested, and positions count ancestors."""
    first, end = key_extents.T
    key, query = np.ogrid[: len(end), : len(end)]
    descends = (first[:, None] < query) & (query < end[:, None]) & (end > 0)
    nested = ~descends | (end[None] <= end[:, None])
    inside = end.max() <= np.flatnonzero(end)[-1] + 1 if end.any() else True
    return bool(inside and nested.all() and (positions == descends.sum(0))[end > 0].all())


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_of_two_trees_are_refused_unless_they_are_those_of_a_third(layout: str, counted: bool):
    refused = 0
    for seed in range(60):
        trees = tree_of(seed), tree_of(1000 + seed)
        shards = [own(layout, 2, rank) for rank in range(2)]
        every = [spans(arrays_of(tree), mine) for tree, mine in zip(trees, shards, strict=True)]
        mixed = [np.empty_like(x[0]) for x in arrays_of(trees[0])]
        for tree, mine in zip(trees, shards, strict=True):
            for x, of_tree in zip(mixed, arrays_of(tree), strict=True):
                x[mine] = of_tree[0, mine]
        key_extents, positions = mixed
        nested = is_one_tree(key_extents, positions if counted else ancestors_of(key_extents))
        with nullcontext() if nested else pytest.raises(ValueError, match="hold shards of different trees"):
            check_one_tree(every, SLOTS, counted)
        refused += not nested
    assert refused > 10


def ancestors_of(key_extents: np.ndarray) -> np.ndarray:
    first, end = key_extents.T
    query = np.arange(len(end))
    return ((first[:, None] < query) & (query < end[:, None])).sum(0)


def test_a_key_hidden_from_itself_is_refused():
    key_extents = np.array([[[0, 3], [2, 3], [2, 3]]])
    with pytest.raises(ValueError, match="row 0, position 1 begins at 2, and a token of a tree sees itself"):
        spans_of(key_extents, np.array([[0, 1, 2]]), np.arange(3))


def test_a_shard_of_a_long_tree_is_a_few_spans():
    key_extents, positions, _ = batch_of_trees(([-1, 0, 0], [4000, 2000, 2000]), 1, 8192)
    for mine in (np.arange(8192), np.arange(1, 8192, 4)):
        assert len(spans_of(key_extents[:, mine], positions[:, mine], mine)) == 3


def test_the_drawing_on_top_of_the_file_is_true():
    tree = [-1, 0, 0], [2, 2, 3]
    key_extents, positions, _ = batch_of_trees(tree, 1, 7)
    mine = [np.array([0, 1, 4, 5]), np.array([2, 3, 6])]
    found = [spans_of(key_extents[:, x], positions[:, x], x) for x in mine]
    assert found == [[(0, 0, 1, 2, 7, 0), (0, 4, 1, 2, 7, 2)], [(0, 2, 1, 2, 4, 2), (0, 6, 1, 1, 7, 4)]]
    check_one_tree(found, 5, True)
