"""shard_batch and the extents of both packages: equal to the bit, right token by token, and the same refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ring_attn_core import LAYOUTS

from ..support.selection import first
from ..support.shards import DOCUMENTS, IDS, KEY_MASK, RANKS, check_shard, extents, is_packed, rows, shard, slots

BATCH, TOKENS = 2, 11
CHECKS = [HealthCheck.function_scoped_fixture]
FEW = settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=CHECKS)


def packed(tokens: int = TOKENS) -> st.SearchStrategy[np.ndarray]:
    return st.lists(rows(tokens), min_size=BATCH, max_size=BATCH).map(np.array)


def in_both(frameworks: Any, call: str, *arguments: Any, **named: Any) -> list[Any]:
    """The call in JAX and in PyTorch, numpy arrays converted."""
    return [run(framework, call, arguments, named) for framework in frameworks]


def run(framework: Any, call: str, arguments: Any, named: Any) -> Any:
    def mine(x: Any) -> Any:
        return framework.array(x) if isinstance(x, np.ndarray) else tuple(map(mine, x)) if isinstance(x, tuple) else x

    return getattr(framework, call)(*map(mine, arguments), **{name: mine(x) for name, x in named.items()})


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
def test_shards_are_right_in_both_to_the_bit(frameworks, documents, layout, ranks, seed, data):
    rng = np.random.default_rng(seed)
    ids, labels = rng.integers(1, 99, (2, BATCH, TOKENS))
    options: dict[str, Any] = {"documents": documents, "restart_positions": data.draw(st.booleans(), "restart")}
    if data.draw(st.booleans(), "labels given"):
        options["labels"] = labels
    if data.draw(st.booleans(), "key_mask given"):
        options["key_mask"] = rng.random((BATCH, TOKENS)) < 0.6
    rank = data.draw(st.integers(0, ranks - 1), "rank")
    for got in in_both(frameworks, "shard_batch", ids, layout, ranks, rank, **options):
        check_shard(got, shard(ids, layout, ranks, rank, **options), TOKENS)


@FEW
@given(documents=packed())
def test_extents_of_ids_are_right_in_both(frameworks, documents):
    np.testing.assert_array_equal(same(in_both(frameworks, "document_extents", documents)), extents(documents))


@FEW
@given(ids=st.lists(st.lists(st.integers(-1, 2), min_size=4, max_size=4), min_size=BATCH, max_size=BATCH))
def test_ids_are_refused_exactly_if_they_are_not_packed_documents(frameworks, ids):
    if all(is_packed(row) for row in ids):
        np.testing.assert_array_equal(same(in_both(frameworks, "document_extents", np.array(ids))), extents(np.array(ids)))
        return
    messages = set()
    for framework in frameworks:
        with pytest.raises(ValueError, match=r"must not decrease|inside a document") as raised:
            framework.document_extents(framework.array(np.array(ids)))
        messages.add(str(raised.value).replace("torch.where", "jnp.where"))
    assert len(messages) == 1


@pytest.mark.parametrize("layout", [None, "zigzag", "balanced"])
def test_zeros_behind_documents_are_taken_for_the_padding_of_maxtext(framework, layout):
    """The advice of the error makes them padding."""

    def call(ids: np.ndarray) -> Any:
        given = framework.array(ids)
        return framework.shard_batch(given, layout, 2, documents=given).extents if layout else framework.document_extents(given)

    ids = np.array([[1, 1, 2, 2, 0, 0], [1, 1, 1, 1, 1, 0]])
    where = "jnp" if framework.name == "jax" else "torch"
    advice = rf"padding, as in MaxText, make it negative: {where}.where\(ids == 0, -1, ids\); else sort them$"
    with pytest.raises(ValueError, match=advice):
        call(ids)
    padded = np.where(ids == 0, -1, ids)
    found = call(padded)
    assert layout or np.array_equal(found, extents(padded))
    with pytest.raises(ValueError, match=r"document 1 at row 0, token 1, after 2: sort them$"):
        call(np.array([[2, 1, 0, 0]]))


@FEW
@given(lengths=st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_cu_seqlens_are_the_ids_they_stand_for(frameworks, lengths):
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ids = np.concatenate([np.repeat(np.arange(4), lengths), np.full(12 - ends[-1], -1)])[None]
    np.testing.assert_array_equal(same(in_both(frameworks, "document_extents", cu_seqlens=ends, length=12)), extents(ids))


def test_cu_seqlens_end_at_their_last_entry_unless_told_otherwise(frameworks):
    ends = np.array([0, 3, 3, 7])
    assert same(in_both(frameworks, "document_extents", cu_seqlens=ends)).tolist() == [[[0, 3]] * 3 + [[3, 7]] * 4]
    assert same(in_both(frameworks, "document_extents", cu_seqlens=ends, length=9)).tolist() == [
        [[0, 3]] * 3 + [[3, 7]] * 4 + [[0, 0]] * 2
    ]


@FEW
@given(prefix=st.lists(st.integers(0, 9), min_size=1, max_size=3))
def test_a_prefix_is_seen_by_all_and_the_rest_is_causal(frameworks, prefix):
    expected = np.array([[[0, max(first, p + 1)] for p in range(9)] for first in prefix])
    np.testing.assert_array_equal(same(in_both(frameworks, "prefix_extents", np.array(prefix), 9)), expected)
    np.testing.assert_array_equal(same(in_both(frameworks, "prefix_extents", prefix[0], 9)), expected[:1])


@pytest.mark.parametrize("shape", first([((2, 1),), ((0, 0),), ((0, 5),), ((2, 0),)]))
def test_nothing_and_one_token_are_batches_too(frameworks, shape):
    documents = np.zeros(shape, np.int32)
    np.testing.assert_array_equal(same(in_both(frameworks, "document_extents", documents)), extents(documents))
    options = {"documents": documents, "key_mask": documents == 0, "restart_positions": True}
    for layout in LAYOUTS:
        expected = (shape[0], len(slots(layout, 3, shape[1], 2)))
        for got in in_both(frameworks, "shard_batch", documents, layout, 3, 2, **options):
            assert [np.asarray(x).shape[:2] for x in got[:5]] == [expected] * 5
    same(in_both(frameworks, "prefix_extents", 0, shape[1]))
    same(in_both(frameworks, "document_extents", cu_seqlens=np.zeros(1, np.int32), length=shape[1]))


X, PAIR = np.zeros((2, 8, 3), np.float32), (np.zeros((1, 4, 2, 3), np.float32), np.zeros((1, 4, 2), np.float32))
NONE, TEXT, LIST = (None, "3", [[1.0, 2.0]])


def call(name: str, *arguments: Any, **named: Any) -> tuple[Any, ...]:
    return name, arguments, named


def extents_of(*ids: Any, **named: Any) -> tuple[Any, ...]:
    return call("document_extents", *(np.array(x) for x in ids), **named)


def batch(ids: Any = IDS, layout: Any = "zigzag", ranks: Any = 2, *rank: Any, **named: Any) -> tuple[Any, ...]:
    return call("shard_batch", ids, layout, ranks, *rank, **named)


def ends(*values: int, **named: Any) -> tuple[Any, ...]:
    return extents_of(cu_seqlens=np.array(values, np.int32), **named)


INTEGERS, ENDS = r"ids must be integers \[batch, length\], got (torch.)?", "cu_seqlens must be 0 and then .* got "
ARRAY, LONG, RING = (
    r"x must be an? .*, got (None|'3'|list|5)",
    "length is the true global number",
    "ranks must be an int, how many",
)
RANK, DIM, PAIRS = "rank must be an int, 0 to 1, got", "is not a dimension of x", r"merge takes two pairs \(out, lse\)"
REFUSED: list[tuple[str, Any]] = [
    ("takes either ids or cu_seqlens, got neither", extents_of()),
    ("takes either ids or cu_seqlens, got both", extents_of(DOCUMENTS, cu_seqlens=np.arange(3))),
    ("length=21 goes with cu_seqlens", extents_of(DOCUMENTS, length=21)),
    (INTEGERS + r"float32 \[3, 21\]", extents_of(DOCUMENTS.astype("f4"))),
    (INTEGERS + r"bool \[3, 21\]", extents_of(KEY_MASK)),
    (INTEGERS + r"int32 \[21\]", extents_of(DOCUMENTS[0].astype("i4"))),
    ("decrease along a row, got document 2 at row 1, token 3, after 3", extents_of([[0, 0, 0, 0], [1, 3, -1, 2]])),
    ("inside a document .* document 1 at row 0, token 3, goes on", extents_of([[0, 1, -1, 1]])),
    (
        r"cu_seqlens must be integers \[documents \+ 1\], got (torch.)?int32 \[1, 2\]",
        extents_of(cu_seqlens=np.zeros((1, 2), np.int32)),
    ),
    (ENDS + r"\[1, 3\]", ends(1, 3)),
    (ENDS + r"\[0, 3, 2\]", ends(0, 3, 2)),
    (ENDS + r"\[\]", ends()),
    ("cu_seqlens ends at 7, beyond length=6: pass a length of at least 7", ends(0, 7, length=6)),
    (LONG, ends(0, 3, length=3.5)),
    (r"prefix must be 0 to length=8 tokens, got \[3, 9\]", call("prefix_extents", np.array([3, 9]), 8)),
    ("prefix must be 0 to length=8 tokens, got -1", call("prefix_extents", -1, 8)),
    (
        r"prefix must be integers \[batch\], got (torch.)?int32 \[1, 1\]",
        call("prefix_extents", np.ones((1, 1), np.int32), 8),
    ),
    (r"prefix must be integers \[\], got (torch.)?float32 \[\]", call("prefix_extents", 2.0, 8)),
    *(("prefix must be", call("prefix_extents", prefix, 8)) for prefix in (NONE, TEXT, [[1], [2, 3]])),
    *((LONG, call("prefix_extents", 3, length)) for length in (NONE, TEXT, [8], -1, 8.5)),
    (INTEGERS + "float32", batch(IDS.astype("f4"))),
    *(("ids must be", batch(ids)) for ids in (NONE, TEXT, 5, [[1, 2], [3]], {}, object())),
    *(("unknown layout", batch(IDS, layout)) for layout in (NONE, ["zigzag"], 5)),
    *((RING, batch(IDS, "zigzag", ranks)) for ranks in (NONE, TEXT, [2], 2.0)),
    ("rank=2 is not one of 2 ranks", batch(IDS, "zigzag", 2, 2)),
    *((RANK, batch(IDS, "zigzag", 2, rank)) for rank in (TEXT, [0], 0.5, False, X)),
    (r"labels must have the shape of ids \[3, 21\], got \[3, 20\]", batch(labels=IDS[:, 1:])),
    ("labels must be integers", batch(labels=IDS / 2)),
    (r"documents must have the shape of ids \[3, 21\], got \[1, 21\]", batch(documents=DOCUMENTS[:1])),
    (r"documents must be integers \[batch, length\]", batch(documents=DOCUMENTS[0])),
    ("document ids must not decrease", batch(documents=DOCUMENTS[:, ::-1].copy())),
    ("key_mask must have the shape of ids", batch(key_mask=KEY_MASK[:, None])),
    ("key_mask must be bool.*got (torch.)?int32: pass key_mask != 0", batch(key_mask=KEY_MASK.astype("i4"))),
    ("key_mask must be bool.*float32.*key_mask == 0 for an additive", batch(key_mask=KEY_MASK.astype("f4"))),
    *((f"{name} must", batch(**{name: x})) for name in ("labels", "documents", "key_mask") for x in (TEXT, 5, [[1], [2, 3]])),
    *(("ignore_index must be one integer", batch(ignore_index=x)) for x in (NONE, TEXT, [1], 0.5)),
    ("restart_positions=True .* pass documents=", batch(restart_positions=True)),
    *((ARRAY, call("to_layout", x, "zigzag", 2)) for x in (NONE, TEXT, LIST, 5)),
    *(("unknown layout", call("to_layout", X, layout, 2)) for layout in (NONE, ["zigzag"], 5)),
    *((RING, call("to_layout", X, "zigzag", ranks)) for ranks in (NONE, TEXT, [2], 2.0, True, X)),
    ("a ring needs at least 1 rank, got 0", call("to_layout", X, "zigzag", 0)),
    *((DIM, call("to_layout", X, "zigzag", 2, dim=dim)) for dim in (NONE, TEXT, [1], 3, -4, 1.0)),
    *(("pad_value must be one number", call("to_layout", X, "zigzag", 2, pad_value=x)) for x in (NONE, TEXT, [0], X)),
    *(
        (rf"pad_value={x} does not fit x, .* integers from {low}", call("to_layout", X.astype(kind), "zigzag", 3, pad_value=x))
        for kind, x, low in (
            ("i4", 0.5, -(2**31)),
            ("i4", np.float32(np.nan), -(2**31)),
            ("u1", -1, 0),
            ("u1", 256, 0),
            ("?", 2, 0),
        )
    ),
    *((ARRAY, call("from_layout", x, "zigzag", 2, 8)) for x in (NONE, TEXT, LIST, 5)),
    *((LONG, call("from_layout", X, "zigzag", 2, length)) for length in (NONE, TEXT, [8], 8.0, -1, X)),
    *((DIM, call("from_layout", X, "zigzag", 2, 8, dim=dim)) for dim in (NONE, TEXT, [1], 3)),
    *((RANK, call("positions", "zigzag", 2, 8, rank)) for rank in (NONE, TEXT, [0], 0.5, True, X)),
    *((LONG, call("positions", "zigzag", 2, length, 0)) for length in (NONE, TEXT, [8], 0.5, -1, X)),
    *((RING, call("positions", "zigzag", ranks, 8, 0)) for ranks in (NONE, TEXT, [2], 2.0)),
    *((PAIRS, call("merge", pair, PAIR)) for pair in (NONE, TEXT, 5, [1.0, 2.0], (1, 2), X, (X,))),
    *((PAIRS, call("merge", PAIR, pair)) for pair in (NONE, TEXT, 5, LIST, (None, X), (X, "3"))),
    *(("lse .* of the same queries", call("merge", PAIR, pair)) for pair in ((X, X), (PAIR[0], X), (PAIR[0][..., :2], PAIR[1]))),
]


@pytest.mark.parametrize(("message", "of"), REFUSED, ids=[f"{of[0]}-{i}" for i, (_, of) in enumerate(REFUSED)])
def test_a_mistake_is_a_value_error_of_one_line_in_the_same_words(framework, message, of):
    with pytest.raises(ValueError, match=message) as raised:
        run(framework, *of)
    assert "\n" not in str(raised.value)


def test_numpy_arrays_are_refused_as_tensors_and_the_error_says_so():
    package = pytest.importorskip("ring_attn_torch")
    for call in (package.to_layout, lambda *x: package.from_layout(*x, 8)):
        with pytest.raises(ValueError, match=r"x must be a torch.Tensor, got ndarray of shape \[2, 8, 3\]: convert it first"):
            call(X, "zigzag", 2)
    with pytest.raises(ValueError, match=r"out must be a torch.Tensor, got ndarray of shape \[1, 4, 2, 3\]"):
        package.merge(PAIR, PAIR)
