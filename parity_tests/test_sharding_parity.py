"""shard_batch and the extents of both packages: equal to the bit, right token by token, and the same refusals."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ring_attn_jax as jax_package
import ring_attn_torch as torch_package
from ring_attn_core import LAYOUTS

from .support.selection import first
from .support.shards import DOCUMENTS, IDS, KEY_MASK, RANKS, check_shard, extents, is_packed, rows, shard, slots

PACKAGES = {"jax": (jax_package, jnp.asarray), "torch": (torch_package, torch.as_tensor)}
BATCH, TOKENS = 2, 11
BOTH = pytest.mark.parametrize(("package", "array"), PACKAGES.values(), ids=PACKAGES)
FEW = settings(max_examples=15, deadline=None, derandomize=True)


def packed(tokens: int = TOKENS) -> st.SearchStrategy[np.ndarray]:
    return st.lists(rows(tokens), min_size=BATCH, max_size=BATCH).map(np.array)


def in_both(call: str, *arguments: Any, **named: Any) -> list[Any]:
    """The call in JAX and in PyTorch, numpy arrays converted."""
    results = []
    for package, array in PACKAGES.values():
        mine = lambda x, array=array: array(x) if isinstance(x, np.ndarray) else x
        results.append(getattr(package, call)(*map(mine, arguments), **{name: mine(x) for name, x in named.items()}))
    return results


def same(results: list[Any]) -> np.ndarray:
    ours, theirs = map(np.asarray, results)
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(ours, theirs)
    return ours


@pytest.mark.slow
@FEW
@given(
    documents=packed(),
    layout=st.sampled_from(list(LAYOUTS)),
    ranks=st.sampled_from(RANKS),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_shards_are_right_in_both_to_the_bit(documents, layout, ranks, seed, data):
    rng = np.random.default_rng(seed)
    ids, labels = rng.integers(1, 99, (2, BATCH, TOKENS))
    options: dict[str, Any] = {"documents": documents, "restart_positions": data.draw(st.booleans(), "restart")}
    if data.draw(st.booleans(), "labels given"):
        options["labels"] = labels
    if data.draw(st.booleans(), "key_mask given"):
        options["key_mask"] = rng.random((BATCH, TOKENS)) < 0.6
    rank = data.draw(st.integers(0, ranks - 1), "rank")
    for got in in_both("shard_batch", ids, layout, ranks, rank, **options):
        check_shard(got, shard(ids, layout, ranks, rank, **options), TOKENS)


@FEW
@given(documents=packed())
def test_extents_of_ids_are_right_in_both(documents):
    np.testing.assert_array_equal(same(in_both("document_extents", documents)), extents(documents))


@FEW
@given(ids=st.lists(st.lists(st.integers(-1, 2), min_size=4, max_size=4), min_size=BATCH, max_size=BATCH))
def test_ids_are_refused_exactly_where_they_are_no_packed_documents(ids):
    if all(is_packed(row) for row in ids):
        np.testing.assert_array_equal(same(in_both("document_extents", np.array(ids))), extents(np.array(ids)))
        return
    messages = set()
    for package, array in PACKAGES.values():
        with pytest.raises(ValueError, match=r"must not decrease|inside a document") as raised:
            package.document_extents(array(np.array(ids)))
        messages.add(str(raised.value).replace("torch.where", "jnp.where"))
    assert len(messages) == 1


@pytest.mark.parametrize("layout", [None, "zigzag", "balanced"])
def test_zeros_behind_documents_are_taken_for_the_padding_of_maxtext(layout):
    """The advice of the error makes them padding."""
    ids = np.array([[1, 1, 2, 2, 0, 0], [1, 1, 1, 1, 1, 0]])
    for (package, array), name in zip(PACKAGES.values(), ("jnp", "torch"), strict=True):
        call = lambda ids, package=package, array=array: (
            package.document_extents(array(ids))
            if layout is None
            else package.shard_batch(array(ids), layout, 2, documents=array(ids)).extents
        )
        advice = rf"padding, as in MaxText, make it negative: {name}.where\(ids == 0, -1, ids\); else sort them$"
        with pytest.raises(ValueError, match=advice):
            call(ids)
        padded = np.where(ids == 0, -1, ids)
        assert layout or np.array_equal(call(padded), extents(padded))
        call(padded)
        with pytest.raises(ValueError, match=r"document 1 at row 0, token 1, after 2: sort them$"):
            call(np.array([[2, 1, 0, 0]]))


@FEW
@given(lengths=st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_cu_seqlens_are_the_ids_they_stand_for(lengths):
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ids = np.concatenate([np.repeat(np.arange(4), lengths), np.full(12 - ends[-1], -1)])[None]
    np.testing.assert_array_equal(same(in_both("document_extents", cu_seqlens=ends, length=12)), extents(ids))


def test_cu_seqlens_end_at_their_last_entry_unless_told_otherwise():
    ends = np.array([0, 3, 3, 7])
    assert same(in_both("document_extents", cu_seqlens=ends)).tolist() == [[[0, 3]] * 3 + [[3, 7]] * 4]
    assert same(in_both("document_extents", cu_seqlens=ends, length=9)).tolist() == [[[0, 3]] * 3 + [[3, 7]] * 4 + [[0, 0]] * 2]


@FEW
@given(prefix=st.lists(st.integers(0, 9), min_size=1, max_size=3))
def test_a_prefix_is_seen_by_all_and_the_rest_is_causal(prefix):
    expected = np.array([[[0, max(first, p + 1)] for p in range(9)] for first in prefix])
    np.testing.assert_array_equal(same(in_both("prefix_extents", np.array(prefix), 9)), expected)
    np.testing.assert_array_equal(same(in_both("prefix_extents", prefix[0], 9)), expected[:1])


@pytest.mark.parametrize("shape", first([((2, 1),), ((0, 0),), ((0, 5),), ((2, 0),)]))
def test_nothing_and_one_token_are_batches_too(shape):
    documents = np.zeros(shape, np.int32)
    np.testing.assert_array_equal(same(in_both("document_extents", documents)), extents(documents))
    options = {"documents": documents, "key_mask": documents == 0, "restart_positions": True}
    for layout in LAYOUTS:
        expected = (shape[0], len(slots(layout, 3, shape[1], 2)))
        for got in in_both("shard_batch", documents, layout, 3, 2, **options):
            assert [np.asarray(x).shape[:2] for x in got[:5]] == [expected] * 5
    same(in_both("prefix_extents", 0, shape[1]))
    same(in_both("document_extents", cu_seqlens=np.zeros(1, np.int32), length=shape[1]))


REFUSED: dict[str, tuple[str, tuple, dict]] = {
    r"takes either ids or cu_seqlens, got neither": ("document_extents", (), {}),
    r"takes either ids or cu_seqlens, got both": ("document_extents", (DOCUMENTS,), {"cu_seqlens": np.arange(3)}),
    r"length=21 goes with cu_seqlens": ("document_extents", (DOCUMENTS,), {"length": 21}),
    r"ids must be integers \[batch, length\], got (torch.)?float32 \[3, 21\]": (
        "document_extents",
        (DOCUMENTS.astype("f4"),),
        {},
    ),
    r"ids must be integers \[batch, length\], got (torch.)?bool \[3, 21\]": ("document_extents", (KEY_MASK,), {}),
    r"ids must be integers \[batch, length\], got (torch.)?int32 \[21\]": ("document_extents", (DOCUMENTS[0].astype("i4"),), {}),
    r"decrease along a row, got document 2 at row 1, token 3, after 3": (
        "document_extents",
        (np.array([[0, 0, 0, 0], [1, 3, -1, 2]]),),
        {},
    ),
    r"inside a document .* document 1 at row 0, token 3, goes on": ("document_extents", (np.array([[0, 1, -1, 1]]),), {}),
    r"cu_seqlens must be integers \[documents \+ 1\], got (torch.)?int32 \[1, 2\]": (
        "document_extents",
        (),
        {"cu_seqlens": np.zeros((1, 2), np.int32)},
    ),
    r"cu_seqlens must be 0 and then .* got \[1, 3\]": ("document_extents", (), {"cu_seqlens": np.array([1, 3])}),
    r"cu_seqlens must be 0 and then .* got \[0, 3, 2\]": ("document_extents", (), {"cu_seqlens": np.array([0, 3, 2])}),
    r"cu_seqlens must be 0 and then .* got \[\]": ("document_extents", (), {"cu_seqlens": np.zeros(0, np.int32)}),
    r"cu_seqlens ends at 7, beyond length=6: pass a length of at least 7": (
        "document_extents",
        (),
        {"cu_seqlens": np.array([0, 7]), "length": 6},
    ),
    r"prefix must be 0 to length=8 tokens, got \[3, 9\]": ("prefix_extents", (np.array([3, 9]), 8), {}),
    r"prefix must be 0 to length=8 tokens, got -1": ("prefix_extents", (-1, 8), {}),
    r"prefix must be integers \[batch\], got (torch.)?int32 \[1, 1\]": ("prefix_extents", (np.ones((1, 1), np.int32), 8), {}),
    r"prefix must be integers \[\], got (torch.)?float32 \[\]": ("prefix_extents", (2.0, 8), {}),
    r"ids must be integers \[batch, length\], got (torch.)?float32": ("shard_batch", (IDS.astype("f4"), "zigzag", 2), {}),
    r"labels must have the shape of ids \[3, 21\], got \[3, 20\]": ("shard_batch", (IDS, "zigzag", 2), {"labels": IDS[:, 1:]}),
    r"labels must be integers": ("shard_batch", (IDS, "zigzag", 2), {"labels": IDS / 2}),
    r"documents must have the shape of ids \[3, 21\], got \[1, 21\]": (
        "shard_batch",
        (IDS, "zigzag", 2),
        {"documents": DOCUMENTS[:1]},
    ),
    r"documents must be integers \[batch, length\]": ("shard_batch", (IDS, "zigzag", 2), {"documents": DOCUMENTS[0]}),
    r"document ids must not decrease": ("shard_batch", (IDS, "zigzag", 2), {"documents": DOCUMENTS[:, ::-1].copy()}),
    r"key_mask must have the shape of ids": ("shard_batch", (IDS, "zigzag", 2), {"key_mask": KEY_MASK[:, None]}),
    r"key_mask must be bool.*got (torch.)?int32: pass key_mask != 0": (
        "shard_batch",
        (IDS, "zigzag", 2),
        {"key_mask": KEY_MASK.astype("i4")},
    ),
    r"key_mask must be bool.*float32.*key_mask == 0 for an additive": (
        "shard_batch",
        (IDS, "zigzag", 2),
        {"key_mask": KEY_MASK.astype("f4")},
    ),
    r"restart_positions=True .* pass documents=": ("shard_batch", (IDS, "zigzag", 2), {"restart_positions": True}),
    r"rank=2 is not one of 2 ranks": ("shard_batch", (IDS, "zigzag", 2, 2), {}),
}


@BOTH
@pytest.mark.parametrize("message", REFUSED)
def test_mistakes_are_refused_in_the_same_words(message, package, array):
    call, arguments, named = REFUSED[message]
    mine = lambda x: array(x) if isinstance(x, np.ndarray) else x
    with pytest.raises(ValueError, match=message):
        getattr(package, call)(*map(mine, arguments), **{name: mine(x) for name, x in named.items()})


X, PAIR = np.zeros((2, 8, 3), np.float32), (np.zeros((1, 4, 2, 3), np.float32), np.zeros((1, 4, 2), np.float32))
NONE, TEXT, LIST = (None, "3", [[1.0, 2.0]])
WRONG: list[tuple[str, tuple, dict, str]] = [
    *(("to_layout", (x, "zigzag", 2), {}, r"x must be an? .*, got (None|'3'|list|5)") for x in (NONE, TEXT, LIST, 5)),
    *(("to_layout", (X, layout, 2), {}, "unknown layout") for layout in (NONE, ["zigzag"], 5)),
    *(
        ("to_layout", (X, "zigzag", ranks), {}, "ranks must be an int, how many members")
        for ranks in (NONE, TEXT, [2], 2.0, True, X)
    ),
    ("to_layout", (X, "zigzag", 0), {}, "a ring needs at least 1 rank, got 0"),
    *(("to_layout", (X, "zigzag", 2), {"dim": dim}, "is not a dimension of x") for dim in (NONE, TEXT, [1], 3, -4, 1.0)),
    *(("to_layout", (X, "zigzag", 2), {"pad_value": x}, "pad_value must be one number") for x in (NONE, TEXT, [0], X)),
    *(
        ("to_layout", (X.astype(dtype), "zigzag", 3), {"pad_value": x}, rf"pad_value={x} does not fit x, .* integers from {low}")
        for dtype, x, low in (
            ("i4", 0.5, -(2**31)),
            ("i4", np.float32(np.nan), -(2**31)),
            ("u1", -1, 0),
            ("u1", 256, 0),
            ("?", 2, 0),
        )
    ),
    *(("from_layout", (x, "zigzag", 2, 8), {}, r"x must be an? .*, got (None|'3'|list|5)") for x in (NONE, TEXT, LIST, 5)),
    *(
        ("from_layout", (X, "zigzag", 2, length), {}, "length is the true global number")
        for length in (NONE, TEXT, [8], 8.0, -1, X)
    ),
    *(("from_layout", (X, "zigzag", 2, 8), {"dim": dim}, "is not a dimension of x") for dim in (NONE, TEXT, [1], 3)),
    *(("positions", ("zigzag", 2, 8, rank), {}, "rank must be an int, 0 to 1, got") for rank in (NONE, TEXT, [0], 0.5, True, X)),
    *(
        ("positions", ("zigzag", 2, length, 0), {}, "length is the true global number")
        for length in (NONE, TEXT, [8], 0.5, -1, X)
    ),
    *(("positions", ("zigzag", ranks, 8, 0), {}, "ranks must be an int") for ranks in (NONE, TEXT, [2], 2.0)),
    *(
        ("merge", (pair, PAIR), {}, r"merge takes two pairs \(out, lse\)")
        for pair in (NONE, TEXT, 5, [1.0, 2.0], (1, 2), X, (X,))
    ),
    *(("merge", (PAIR, pair), {}, r"merge takes two pairs \(out, lse\)") for pair in (NONE, TEXT, 5, LIST, (None, X), (X, "3"))),
    *(("merge", (PAIR, pair), {}, "lse .* of the same queries") for pair in ((X, X), (PAIR[0], X), (PAIR[0][..., :2], PAIR[1]))),
    *(("shard_batch", (ids, "zigzag", 2), {}, "ids must be") for ids in (NONE, TEXT, 5, [[1, 2], [3]], {}, object())),
    *(("shard_batch", (IDS, layout, 2), {}, "unknown layout") for layout in (NONE, ["zigzag"], 5)),
    *(("shard_batch", (IDS, "zigzag", ranks), {}, "ranks must be an int") for ranks in (NONE, TEXT, [2], 2.0)),
    *(("shard_batch", (IDS, "zigzag", 2, rank), {}, "rank must be an int, 0 to 1, got") for rank in (TEXT, [0], 0.5, False, X)),
    *(("shard_batch", (IDS, "zigzag", 2), {"labels": x}, "labels must") for x in (TEXT, 5, [[1], [2, 3]])),
    *(("shard_batch", (IDS, "zigzag", 2), {"documents": x}, "documents must") for x in (TEXT, 5, [[1], [2, 3]])),
    *(("shard_batch", (IDS, "zigzag", 2), {"key_mask": x}, "key_mask must") for x in (TEXT, 5, [[1], [2, 3]])),
    *(
        ("shard_batch", (IDS, "zigzag", 2), {"ignore_index": x}, "ignore_index must be one integer")
        for x in (NONE, TEXT, [1], 0.5)
    ),
    *(("prefix_extents", (prefix, 8), {}, "prefix must be") for prefix in (NONE, TEXT, [[1], [2, 3]])),
    *(("prefix_extents", (3, length), {}, "length is the true global number") for length in (NONE, TEXT, [8], -1, 8.5)),
    ("document_extents", (), {"cu_seqlens": np.array([0, 3]), "length": 3.5}, "length is the true global number"),
]


@BOTH
@pytest.mark.parametrize(
    ("call", "arguments", "named", "message"), WRONG, ids=[f"{call}-{i}" for i, (call, *_) in enumerate(WRONG)]
)
def test_a_wrong_type_is_a_value_error_that_says_what_was_expected(call, arguments, named, message, package, array):
    def mine(x):
        return array(x) if isinstance(x, np.ndarray) else tuple(map(mine, x)) if isinstance(x, tuple) else x

    with pytest.raises(ValueError, match=message) as raised:
        getattr(package, call)(*map(mine, arguments), **{name: mine(x) for name, x in named.items()})
    assert "\n" not in str(raised.value)


def test_numpy_arrays_are_no_tensors_and_the_error_says_so():
    for call in (torch_package.to_layout, lambda *x: torch_package.from_layout(*x, 8)):
        with pytest.raises(ValueError, match=r"x must be a torch.Tensor, got ndarray of shape \[2, 8, 3\]: convert it first"):
            call(X, "zigzag", 2)
    with pytest.raises(ValueError, match=r"out must be a torch.Tensor, got ndarray of shape \[1, 4, 2, 3\]"):
        torch_package.merge(PAIR, PAIR)
