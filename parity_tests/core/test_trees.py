"""Prefix trees against brute force: who sees whom, and rollouts whose every label has the prefix that it has alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_attn_core.data.rollouts import Rollouts, pack_rollouts
from ring_attn_core.data.trees import longest_path, tree_extents, trees_of

from ..support.rollouts import ancestors, drawn_rollouts, drawn_tree, weights_of

quick = settings(derandomize=True, deadline=None, max_examples=200)
seeds = st.integers(0, 2**32 - 1)


@quick
@given(seeds, st.integers(1, 20))
def test_a_token_sees_its_ancestors_and_counts_them(seed: int, segments: int):
    parents, lengths = drawn_tree(np.random.default_rng(seed), segments)
    key_extents, positions = tree_extents(parents, lengths, tokens=sum(lengths) + 3)
    paths = ancestors(parents, lengths)
    query = np.arange(len(paths) + 3)[:, None]
    seen = (query >= query.T) & (query >= key_extents[0, :, 0]) & (query < key_extents[0, :, 1])
    assert [np.flatnonzero(row).tolist() for row in seen] == paths + [[]] * 3
    assert positions[0].tolist() == [len(path) - 1 for path in paths] + [0] * 3
    assert longest_path(trees_of(parents, lengths)) == max(map(len, paths))
    assert trees_of(parents, lengths)[0].pairs == sum(map(len, paths))


def test_the_drawings_on_top_of_the_files_are_true():
    key_extents, positions = tree_extents([-1, 0, 0, 2, 2], [4, 3, 1, 2, 1])
    assert key_extents[0, [0, 4, 7, 8, 10], 1].tolist() == [11, 7, 11, 10, 11]
    assert positions[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 5]
    packed = pack_rollouts([list(b"abcde"), list(b"abcf")])
    assert bytes(packed.ids[0].tolist()) == b"abcdecf"
    assert packed.labels[0].tolist() == [*b"bcde", -100, *b"f", -100]
    assert packed.label_weights[0].tolist() == [2, 2, 1, 1, 0, 1, 0]
    assert packed.tree == (((-1, 0, 0),), ((2, 3, 2),))
    assert (packed.saved_tokens, packed.longest_path, packed.counts) == (2, 5, (4, 3))


def test_the_other_masks_that_the_page_draws_are_their_key_extents():
    page = (Path(__file__).parents[2] / "docs" / "trees.md").read_text()
    lines = page.partition("## Other masks by key extents")[2].partition("```text\n")[2].partition("```")[0].splitlines()
    drawn = np.array([line.split() for line in lines[1:7]]).reshape(6, 4, 6) == "x"
    first, end = (np.array(line.split()[1:], int).reshape(4, 6) for line in lines[8:10])
    query, key = np.arange(6)[:, None, None], np.arange(6)
    causally = (np.array(lines[10].split()[1:]) == "causal()")[:, None]
    np.testing.assert_array_equal(drawn, (query >= first) & (query < end) & ((query >= key) | ~causally))
    assert tree_extents([-1, 0, 0], [2, 2, 2]).key_extents[0].tolist() == np.stack([first[1], end[1]], -1).tolist()


def test_rows_of_a_batch_are_padded_with_keys_that_no_query_sees():
    key_extents, positions = tree_extents([[-1, 0], [-1]], [[1, 2], [2]])
    assert key_extents.tolist() == [[[0, 3], [1, 3], [2, 3]], [[0, 2], [1, 2], [0, 0]]]
    assert positions.tolist() == [[0, 1, 2], [0, 1, 0]]
    assert key_extents.dtype == positions.dtype == np.int32


@quick
@given(seeds, st.integers(1, 12), st.integers(1, 9), st.integers(1, 4), st.none() | st.integers(0, 12))
def test_every_label_has_the_prefix_and_the_weight_that_it_has_alone(
    seed: int, count: int, longest: int, vocab: int, room: int | None
):
    drawn = drawn_rollouts(np.random.default_rng(seed), count, longest, vocab)
    rollouts = drawn["rollouts"]
    length = None if room is None else max(map(len, rollouts)) + room
    packed = pack_rollouts(**drawn, length=length)
    prefixes = prefixes_of(packed)
    slots = iter(packed.predictors.tolist())
    for tokens, mask in zip(rollouts, drawn["loss_masks"], strict=True):
        for i in range(1, len(tokens)):
            slot = next(slots)
            assert prefixes[slot] == tuple(tokens[:i])
            assert not mask[i] or packed.labels.flat[slot] == tokens[i]
        assert tuple(tokens) in prefixes.values()
    assert next(slots, None) is None
    sums: dict[Any, float] = {}
    for slot, prefix in prefixes.items():
        label, weight = int(packed.labels.flat[slot]), float(packed.label_weights.flat[slot])
        if label != -100:
            sums[prefix, label] = sums.get((prefix, label), 0) + weight
        assert label != -100 or weight == 0
        assert packed.positions.flat[slot] == len(prefix) - 1
    assert sums == weights_of(drawn)
    padding = np.setdiff1d(np.arange(packed.ids.size), [*prefixes])
    assert (packed.labels.flat[padding] == -100).all() and not packed.label_weights.flat[padding].any()
    assert packed.saved_tokens == sum(map(len, rollouts)) - len(prefixes)
    assert packed.longest_path == max(map(len, rollouts))
    assert length is None or max(map(sum, packed.lengths)) <= length


@quick
@given(seeds, st.integers(1, 12), st.integers(1, 9), st.integers(1, 4))
def test_no_token_is_computed_twice_in_a_row(seed: int, count: int, longest: int, vocab: int):
    rollouts = drawn_rollouts(np.random.default_rng(seed), count, longest, vocab)["rollouts"]
    following: dict[Any, set[int]] = {}
    for tokens in rollouts:
        for i in range(1, len(tokens) + 1):
            following.setdefault(tuple(tokens[:i]), set()).update(tokens[i : i + 1])
    packed = pack_rollouts(rollouts)
    assert packed.ids.shape == (1, sum(max(len(labels), 1) for labels in following.values()))
    parents, lengths = packed.tree
    forks = np.bincount(np.asarray(parents[0]) + 1, minlength=len(parents[0]) + 1)[1:]
    assert (forks != 1).all()  # a segment with one child would be one segment with it
    trees_of(parents, lengths)


def prefixes_of(packed: Rollouts) -> dict[int, tuple[int, ...]]:
    """The tokens on the path to each slot, itself the last, by row * tokens + index."""
    width = packed.ids.shape[1]
    return {
        row * width + slot: tuple(packed.ids[row, path].tolist())
        for row, tree in enumerate(zip(*packed.tree, strict=True))
        for slot, path in enumerate(ancestors(*tree))
    }


def test_a_parent_of_one_token_vanishes_and_a_prefix_ends_inside_its_segment():
    packed = pack_rollouts([[1], [1, 2], [1, 2, 3], [1, 4], [1, 4]], weights=[1, 2, 4, 8, 16])
    assert packed.tree == (((-1, -1),), ((3, 2),))
    assert packed.ids.tolist() == [[1, 2, 3, 1, 4]]
    assert packed.label_weights.tolist() == [[6, 4, 0, 24, 0]]
    assert packed.predictors.tolist() == [0, 0, 1, 3, 3]


def test_a_tree_that_does_not_fit_repeats_its_prefix_in_the_next_row():
    prompt = [7, 8, 9]
    packed = pack_rollouts([[*prompt, i, i] for i in range(4)] + [[5, 5]], length=8)
    assert packed.ids.tolist() == [[5, 5, 7, 8, 9, 0, 0, 0], [7, 8, 9, 1, 1, 9, 2, 2], [7, 8, 9, 3, 3, 0, 0, 0]]
    assert packed.lengths == ((2, 5), (2, 3, 3), (5,))
    assert packed.saved_tokens == 22 - 20


def test_a_mask_leaves_the_label_out_and_a_weight_of_zero_keeps_it():
    packed = pack_rollouts([[1, 2, 3, 4]], loss_masks=[[1, 0, 1, 1]], weights=[[9.0, 9.0, 0.0, -0.5]])
    assert packed.labels.tolist() == [[-100, 3, 4, -100]]
    assert packed.label_weights.tolist() == [[0, 0, -0.5, 0]]


@pytest.mark.parametrize(
    ("parents", "lengths", "message"),
    [
        ([-1, 2, 0], [1, 1, 1], "row 0, segment 1 has the parent 2: a parent comes before its children"),
        ([0, 0], [1, 1], "segment 0 has the parent 0: the first segment is a root"),
        ([-1, 0, 0, 1], [1, 1, 1, 1], "segment 3 has the parent 1, whose subtree ended before: order segments depth-first"),
        ([-1, -1, 0], [1, 1, 1], "segment 2 has the parent 0, whose subtree ended before"),
        ([-2], [1], "segment 0 has the parent -2"),
        ([-1, 0], [3, 0], "segment 1 has 0 tokens: leave out an empty segment"),
        ([-1, 0], [3], "row 0 of the tree has 2 parents and 1 lengths"),
        ([[-1], [-1, 0]], [[1], [2]], "row 1 of the tree has 2 parents and 1 lengths"),
        ([[-1], [-1]], [[1]], "parents have 2 rows and lengths 1"),
        ([], [], "row 0 of the tree has no segment"),
        ([-1.0], [1], "parents must be a list of ints, .*, got -1.0"),
        ([-1], "3", "lengths must be a list of ints, .*, got '3'"),
        ([-1], 3, "lengths must be a list of ints, .*, got 3"),
        ([-1, 0], [2**31 - 1, 1], "row 0 of the tree has 2147483648 tokens, and positions are int32: pass at most 2147483647"),
    ],
)
def test_an_invalid_tree_is_refused(parents: Any, lengths: Any, message: str):
    with pytest.raises(ValueError, match=message):
        tree_extents(parents, lengths)


def test_arrays_are_trees_too_and_a_row_must_hold_its_tree():
    assert trees_of(np.array([[-1, 0]]), np.array([[2, 3]])) == trees_of([-1, 0], (2, 3))
    with pytest.raises(ValueError, match="a row of the tree has 5 tokens, and ids have 4"):
        tree_extents([-1, 0], [2, 3], tokens=4)


class Weight:
    """A number that a framework differentiates by, which numpy cannot read."""

    requires_grad = True

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise RuntimeError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rollouts": []}, "rollouts must be a list of token lists, at least one"),
        ({"rollouts": "abc"}, "rollouts must be a list of token lists, at least one, got 'abc'"),
        ({"rollouts": [[1], []]}, r"rollouts\[1\] is empty"),
        ({"rollouts": [[1], 2]}, r"rollouts\[1\] must be a list of token ids, got 2"),
        ({"rollouts": [[1.5]]}, r"rollouts\[0\] must be a list of token ids, got float64 \[1\]"),
        ({"rollouts": [["a", "b"]]}, r"rollouts\[0\] must be a list of token ids, got <U1 \[2\]"),
        ({"rollouts": [np.array(3)]}, r"rollouts\[0\] must be a list of token ids, got ndarray of shape \[\]"),
        ({"rollouts": [[1, -100]]}, r"rollouts\[0\] holds -100: token ids are at least 0"),
        ({"rollouts": [[1, 2, 3]], "length": 2}, r"rollouts\[0\] has 3 tokens, and a row at most length=2"),
        ({"rollouts": [[1]], "length": 0}, "length is the largest number of tokens of a row, an int of at least 1, got 0"),
        (
            {"rollouts": [[1, 2]], "weights": [1.0, 2.0]},
            "weights must be a list with one entry for each of the 1 rollouts, got 2",
        ),
        ({"rollouts": [[1, 2]], "weights": 1.0}, "weights must be a list with one entry for each of the 1 rollouts, got 1.0"),
        ({"rollouts": [[1, 2]], "weights": [[1.0]]}, r"weights\[0\] must be a number, or a list .*, 2 here, got float64 \[1\]"),
        ({"rollouts": [[1, 2]], "weights": [float("nan")]}, r"weights\[0\] holds a number that is not finite"),
        ({"rollouts": [[1, 2]] * 2, "weights": [3e38, 3e38]}, r"weights of shared tokens add up to 6e\+38, which float32 cannot"),
        (
            {"rollouts": [[1, 2]], "weights": [Weight()]},
            r"weights\[0\] requires a gradient, and weights are constants: pass .*detach",
        ),
        ({"rollouts": [[1, 2]], "loss_masks": [True]}, r"loss_masks\[0\] must be a list with True .*, 2 here, got bool \[\]"),
        ({"rollouts": [[1, 2]], "loss_masks": [[0, 0.5]]}, r"loss_masks\[0\] must hold True or False"),
    ],
)
def test_invalid_rollouts_are_refused(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        pack_rollouts(**arguments)
