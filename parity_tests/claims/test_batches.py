"""Shards of batches: they go back to whole sequences, documents and trees stay apart, and what does not fit is refused."""

from __future__ import annotations

import numpy as np
import pytest

from ring_attn_core import LAYOUTS

from ..support.shards import DOCUMENTS, IDS, KEY_MASK, LABELS, LENGTH, extents


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_go_back_to_whole_sequences(framework, layout):
    given = framework.arrays({"documents": DOCUMENTS, "key_mask": KEY_MASK, "labels": LABELS})
    batch = framework.shard_batch(framework.array(IDS), layout, 4, **given)
    back = lambda x: np.asarray(framework.from_layout(x, layout, 4, LENGTH))
    np.testing.assert_array_equal(back(batch.ids), IDS)
    np.testing.assert_array_equal(back(batch.labels), np.where((DOCUMENTS < 0) | ~KEY_MASK, -100, LABELS))
    np.testing.assert_array_equal(back(batch.positions), np.broadcast_to(np.arange(LENGTH), IDS.shape))
    np.testing.assert_array_equal(back(batch.extents), extents(DOCUMENTS))
    np.testing.assert_array_equal(back(batch.key_mask), KEY_MASK)
    prefix = framework.prefix_extents(5, LENGTH)
    np.testing.assert_array_equal(back(framework.to_layout(prefix, layout, 4)), prefix)


def test_a_million_tokens_are_packed_right(framework):
    lengths = np.random.default_rng(0).integers(1, 4000, 500)
    first = np.repeat(np.cumsum(lengths) - lengths, lengths)
    expected = np.stack([first, first + np.repeat(lengths, lengths)], -1)[None]
    documents = framework.array(np.repeat(np.arange(500), lengths)[None])
    assert len(first) > 900_000
    np.testing.assert_array_equal(framework.document_extents(documents), expected)
    ends = framework.array(np.concatenate([[0], np.cumsum(lengths)]))
    np.testing.assert_array_equal(framework.document_extents(cu_seqlens=ends), expected)


POSITION = r"position must be (an int|integers)"


@pytest.mark.parametrize(
    ("call", "x", "options", "message"),
    [
        ("gather", np.ones((1, 3)), {}, "x must be this rank's shard .*, got shape .3."),
        ("gather", [1.0], {}, "x must be an? (array|torch.Tensor), got list"),
        ("gather", np.ones((1, 5)), {}, "x holds 5 tokens, and of length=5 over 1 ranks in zigzag a shard has 6"),
        ("gather", np.ones((1, 6)), {"layout": "spiral"}, "unknown layout 'spiral'"),
        ("gather", np.ones((1, 6)), {"length": 5.5}, "length is the true global number"),
        ("gather_token", np.ones((1, 6)), {"layout": "spiral"}, "unknown layout 'spiral'"),
        ("gather_token", np.ones((1, 6)), {"length": 5.5}, "length is the true global number"),
        ("gather_token", np.ones((1, 6)), {"position": 6}, "position must be an int from -6 to 5, or integers"),
        ("gather_token", np.ones((1, 6)), {"position": 0.5}, POSITION + ".*, got"),
        ("gather_token", np.ones((1, 6)), {"position": np.ones(1, "f4")}, POSITION + r" \[1\], .*, got (torch.)?float32 \[1\]"),
        ("gather_token", np.ones((2, 6)), {"position": np.ones(1, int)}, POSITION + r" \[2\]"),
    ],
)
def test_gather_refuses_an_invalid_shard(framework, call, x, options, message):
    arguments = framework.arrays(options)
    held = lambda shard: x if isinstance(x, list) else shard[0] if x.shape[1] == 3 else shard
    run = lambda shard, **ring: getattr(framework, call)(held(shard), **arguments, **ring)
    if framework.name == "torch":
        with pytest.raises(ValueError, match=message):
            run(framework.array(np.asarray(x)))
    else:
        framework.refuses(message, 1, run, np.ones((1, 6)) if isinstance(x, list) else x)


def test_labels_that_cross_documents_are_refused(framework):
    ids, documents = map(framework.array, (np.arange(12)[None], np.array([[0] * 3 + [1] * 2 + [2] * 7])))
    following = framework.array(np.roll(np.arange(12), -1)[None])
    with pytest.raises(ValueError, match="the label of token 2 of row 0, the last of its document"):
        framework.shard_batch(ids, "zigzag", 2, documents=documents, labels=following)
    framework.shard_batch(ids, "zigzag", 2, documents=documents, labels=ids)


def test_a_label_of_a_tree_stays_within_its_segment(framework):
    shard = framework.shard_batch(framework.array(np.arange(7)[None]), "contiguous", 1, tree=([-1, 0, 0], [2, 3, 1]))
    assert shard.labels.tolist() == [[1, -100, 3, 4, -100, -100, -100]]
    assert shard.positions.tolist() == [[0, 1, 2, 3, 4, 2, 0]]
    assert shard.key_extents[0].tolist() == [[0, 6], [1, 6], [2, 5], [3, 5], [4, 5], [5, 6], [0, 0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tree": ([-1], [9])}, "a row of the tree has 9 tokens, and ids have 7"),
        ({"tree": 3}, r"tree must be a pair \(parents, lengths\)"),
        ({"tree": ([[-1]] * 3, [[7]] * 3)}, "tree has 3 rows and ids have 2"),
        ({"tree": ([-1], [7]), "documents": np.zeros((2, 7), int)}, "documents and tree were given"),
        ({"tree": ([-1], [7]), "restart_positions": True}, "restart_positions=True .* leave it out, as with a tree"),
    ],
)
def test_a_tree_that_does_not_fit_its_batch_is_refused(framework, arguments, message):
    with pytest.raises(ValueError, match=message):
        framework.shard_batch(framework.array(np.zeros((2, 7), int)), "zigzag", 2, 0, **framework.arrays(arguments))
