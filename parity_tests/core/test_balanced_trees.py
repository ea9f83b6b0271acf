"""The balanced layout of prefix trees: every position once, equal work, and subtrees on one rank if that is even."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_attn_core.data import balanced_trees
from ring_attn_core.data.balanced_trees import balanced_tree_layout, tree_work
from ring_attn_core.data.trees import Tree
from ring_attn_core.layouts import LAYOUTS
from ring_attn_core.runs import Run

from ..support.rollouts import drawn_tree

GROUP: Any = (-1, *[0] * 16), (16384, *[1024] * 16)
"""A prompt with 16 completions."""

OF_HALVES: dict[str, Any] = {"length": 5.5}


def forest(prompts: int, completions: int, lengths: Callable[[int], int]) -> tuple[list[int], list[int]]:
    """Return prompts with completions each; ``lengths``: of a segment by its index in its tree."""
    each = completions + 1
    parents = [-1 if segment % each == 0 else segment // each * each for segment in range(prompts * each)]
    return parents, [lengths(segment % each) for segment in range(prompts * each)]


def long_tree(seed: int, segments: int, longest: int) -> tuple[list[int], list[int]]:
    rng = np.random.default_rng(seed)
    return drawn_tree(rng, segments)[0], np.exp(rng.uniform(2, np.log(longest), segments)).astype(int).tolist()


def figures(rows: list[tuple[Any, Any]], ranks: int) -> tuple[float, float]:
    """Return the largest work of a rank over the mean, and the remote keys of the first row as a share of a ring's."""
    trees = [Tree(tuple(parents), tuple(lengths)) for parents, lengths in rows]
    layout = balanced_tree_layout([tree.parents for tree in trees], [tree.lengths for tree in trees], ranks)
    held = lambda tree, rank: tuple(x for run in layout.held(rank) if (x := run.before(tree.tokens)).length)
    work = [[tree_work(tree, held(tree, rank)) for rank in range(ranks)] for tree in trees]
    pairs = [sum(each[rank].pairs for each in work) for rank in range(ranks)]
    return max(pairs) * ranks / sum(pairs), sum(each.remote for each in work[0]) / max(ranks * (ranks - 1) * layout.seq_local, 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 8), st.integers(0, 9))
def test_each_position_is_held_once_and_each_rank_holds_as_many(seed: int, rows: int, ranks: int, padding: int):
    rng = np.random.default_rng(seed)
    parents, lengths = zip(*(drawn_tree(rng, int(rng.integers(1, 12))) for _ in range(rows)), strict=True)
    length = max(map(sum, lengths)) + padding
    layout = balanced_tree_layout(parents, lengths, ranks, length=length)
    held = [position for rank in range(ranks) for position in layout.positions(rank)]
    assert sorted(held) == list(range(ranks * -(-length // ranks)))
    assert (layout.ranks, layout.length, layout.ascends) == (ranks, length, True)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.sampled_from([2, 3, 4, 8]), st.sampled_from([50, 3000, 20000]))
def test_any_trees_are_balanced_within_1_percent(seed: int, segments: int, ranks: int, longest: int):
    rows = [long_tree(seed + row, segments, longest) for row in range(1 + seed % 3)]
    if max(sum(lengths) for _, lengths in rows) >= 128 * ranks:
        assert figures(rows, ranks)[0] <= 1.01


@pytest.mark.parametrize(
    ("tree", "ranks", "share"),
    [
        (GROUP, 4, 0.51),
        (GROUP, 8, 0.5),
        (forest(13, 8, lambda segment: 4000 if segment == 0 else 100 + 200 * segment), 8, 0.07),
        (long_tree(0, 300, 3000), 8, 0.05),
        (forest(130, 8, lambda segment: 4000 if segment == 0 else 100 + 200 * segment), 64, 0.01),
    ],
    ids=["a prompt", "a prompt on 8 ranks", "13 prompts", "random", "130 prompts"],
)
def test_work_is_even_and_few_keys_of_a_ring_are_seen(tree: tuple[Any, Any], ranks: int, share: float):
    balance, of_ring = figures([tree], ranks)
    assert balance <= 1.01
    assert of_ring <= share


def test_trees_that_fit_a_rank_stay_whole_and_nothing_travels():
    for prompts, ranks in ((8, 8), (16, 4)):
        assert figures([forest(prompts, 8, lambda segment: 4096 if segment == 0 else 512)], ranks) == (1.0, 0.0)


def test_subtrees_that_leave_ranks_out_of_balance_are_divided(monkeypatch: pytest.MonkeyPatch):
    tree = [-1, 0, 0, -1, 3], [220, 8, 21, 44, 93]
    assert figures([tree], 3)[0] <= 1.01
    monkeypatch.setattr(balanced_trees, "MAX_UNEVEN", 2.0)
    assert figures([tree], 3)[0] > 1.03


def test_the_drawing_of_the_module_shows_what_the_function_returns():
    tree = Tree((-1, 0, 0, -1, 3, 3, -1, 6, 6), (6, 2, 2, 4, 2, 2, 8, 3, 3))
    layout, drawn = balanced_tree_layout(*tree, 4), balanced_trees.__doc__ or ""
    ranks = {position: rank for rank in range(4) for position in layout.positions(rank)}
    assert "rank       " + " ".join(str(ranks[position]) for position in range(32)) in drawn
    letters = (letter for letter, length in zip("ABCDEFGHI", tree.lengths, strict=True) for _ in range(length))
    assert "segment    " + " ".join(letters) in drawn
    numbers = {line.split()[0]: line for line in drawn.splitlines() if line.strip()}
    for name in ("balanced", "zigzag", "contiguous"):
        runs: list[tuple[Run, ...]] = [
            layout.held(rank) if name == "balanced" else LAYOUTS[name](rank, 4, 8) for rank in range(4)
        ]
        work = [tree_work(tree, each) for each in runs]
        expected = [*(each.pairs for each in work), *(each.remote for each in work)]
        assert [int(word) for word in numbers[name].split() if word.isdigit()] == expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: balanced_tree_layout([-1, 0], [4, 2], 0), "a ring needs at least 1 rank, got 0"),
        (lambda: balanced_tree_layout([-1, 0], [4, 2], 2, length=5), "a row of the tree has 6 tokens, and length is 5"),
        (lambda: balanced_tree_layout([-1, 0], [4, 2], 2, **OF_HALVES), "length is the true global number of tokens"),
        (lambda: balanced_tree_layout([-1, 1], [4, 2], 2), "row 0, segment 1 has the parent 1"),
        (lambda: balanced_tree_layout([-1], 4, 2), "lengths must be a list of ints"),
    ],
)
def test_a_mistake_is_answered_with_what_was_expected_and_what_came(call: Callable[[], object], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_more_ranks_than_tokens_and_one_rank_are_dealt():
    assert balanced_tree_layout([-1, 0, 0], [4, 2, 3], 1).runs == (((0, 9),),)
    assert balanced_tree_layout([-1], [2], 3).seq_local == 1
