"""Tests of the index of slots: every rank reads each of its slots and labels once, and a run goes on anywhere unchanged."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_attn_core import LAYOUTS
from ring_attn_core.data.index import Index, PackedRows, batches_of, reads, shuffle, state_of

from ..support import corpus
from ..support.corpus import LENGTH, LENGTHS, RANKS

quick = settings(derandomize=True, deadline=None, max_examples=100)


@quick
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=8),
    st.sampled_from(list(LAYOUTS)),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 5),
)
def test_every_slot_is_read_by_one_rank_with_its_label(lengths: list[int], layout: str, ranks: int, pieces: int, context: int):
    length = 2 * ranks * pieces
    held = PackedRows(lengths, length).spans(context)
    stream = [(d, token) for d, tokens in enumerate(lengths) for token in range(tokens)]
    expected = dict(enumerate(stream[context * length : (context + 1) * length]))
    found, following = {}, {}
    for rank in range(ranks):
        runs = corpus.settings(length=length, layout=layout, ranks=ranks, rank=rank).runs()
        position_of = [position for run in runs for position in run.positions()]
        for read in reads(held, runs):
            for i in range(read.count):
                position, token = position_of[read.slot + i], (read.span.document, read.first + i * read.stride)
                assert position not in found
                found[position] = token
                if i < read.labelled:
                    following[position] = (token[0], token[1] + 1)
    assert found == expected
    labels = {p: expected[p + 1] for p in expected if p + 1 in expected and expected[p + 1][0] == expected[p][0]}
    assert following == labels


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_rank_takes_at_most_one_token_more_for_each_of_its_runs(layout: str, ranks: int):
    contexts = PackedRows(LENGTHS, LENGTH)
    for rank in range(ranks):
        of = corpus.settings(layout=layout, ranks=ranks, rank=rank)
        for context in range(contexts.tokens // LENGTH):
            taken = sum(max(read.count, read.labelled + 1) for read in reads(contexts.spans(context), of.runs()))
            assert LENGTH // ranks <= taken <= LENGTH // ranks + len(of.runs())


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("last", ["drop", "pad"])
@pytest.mark.parametrize(("batch_size", "replicas"), [(1, 1), (3, 1), (2, 2), (1, 3)])
def test_replicas_share_an_epoch_and_every_token_comes_once(shuffle: bool, last: str, batch_size: int, replicas: int):
    options = {"shuffle": shuffle, "last": last, "batch_size": batch_size, "replicas": replicas}
    of = [Index(LENGTHS, corpus.settings(replica=replica, **options)) for replica in range(replicas)]
    tokens, batch = sum(LENGTHS), batch_size * replicas * LENGTH
    assert {index.batches for index in of} == {tokens // batch if last == "drop" else -(-tokens // batch)}
    for epoch in range(2):
        seen = [
            (piece.document, piece.first + i)
            for number in range(epoch * of[0].batches, (epoch + 1) * of[0].batches)
            for index in of
            for pieces in index.batch(number)
            for piece in pieces
            for i in range(piece.count)
        ]
        assert len(seen) == len(set(seen)) == (tokens if last == "pad" else of[0].batches * batch)


def test_another_seed_or_epoch_is_another_order():
    orders = set()
    for seed in range(3):
        index = Index(LENGTHS, corpus.settings(seed=seed, epochs=None))
        orders |= {str([index.batch(epoch * index.batches + i) for i in range(index.batches)]) for epoch in range(3)}
    assert len(orders) == 9
    plain = Index(LENGTHS, corpus.settings(shuffle=False, epochs=2))
    assert [plain.batch(i) for i in range(plain.batches)] == [plain.batch(plain.batches + i) for i in range(plain.batches)]


def test_contexts_are_shuffled_by_a_draw_of_their_own():
    """Each document fills one context, so both orders are of as many."""
    index = Index([LENGTH] * 9, corpus.settings(seed=3))
    documents, contexts = (shuffle(9, what, 3, 0) for what in ("documents", "contexts"))
    assert documents != contexts
    assert [index.batch(i)[0][0].document for i in range(9)] == [documents[context] for context in contexts]


OPTIONS = [{"last": "drop"}, {"last": "pad", "batch_size": 2, "epochs": 3}, {"shuffle": False, "epochs": 2}]


@pytest.mark.parametrize("options", OPTIONS)
def test_a_run_resumes_at_every_position_with_other_ranks_and_another_layout(options: dict, tmp_path):
    corpus.write_texts(tmp_path)
    first = corpus.batches(tmp_path, rank=None, **options)
    everything, states = [], [first.state()]
    for arrays in first.iterate():
        everything.append(arrays)
        states.append(first.state())
    assert len(everything) == first.index.end
    for taken, state in enumerate(states):
        assert state == first.state(taken)
        later = corpus.batches(tmp_path, rank=None, ranks=3, layout="contiguous", **options)
        later.resume(json.loads(state) if taken % 2 else state)
        assert later.state() == state
        rest = list(later.iterate())
        assert len(rest) == len(everything) - taken
        for mine, theirs in zip(rest, everything[taken:], strict=True):
            back = np.argsort(theirs.positions[0])
            corpus.assert_same(mine, [x if x is None else x[:, back] for x in theirs])


@pytest.mark.parametrize("every", [2, 3, 8])
def test_workers_together_make_the_batches_of_one(every: int, tmp_path):
    corpus.write_texts(tmp_path)
    alone = list(corpus.batches(tmp_path, epochs=2).iterate())
    shared = [corpus.batches(tmp_path, epochs=2).iterate(worker, every) for worker in range(every)]
    for number, arrays in enumerate(alone):
        corpus.assert_same(next(shared[number % every]), arrays)
    assert [list(worker) for worker in shared] == [[]] * every


STATE = {
    "format": 1,
    "batches": 2,
    "data": "d",
    "length": LENGTH,
    "contexts_per_batch": 1,
    "seed": 0,
    "shuffle": True,
    "last": "drop",
}
REFUSED = {
    "cannot be read as JSON": "{",
    "must be what .state\\(\\) returned, with format, batches, data, .* got 3": "3",
    "must be what .state\\(\\) returned, .* got the keys batches": {"batches": 3},
    "got None": None,
    "got list": [1],
    "has format 2, and this version of ring-attn goes on from format 1": STATE | {"format": 2},
    "files in data are not those of this state": STATE | {"data": "e"},
    "with length=48, and this dataset has length=24: make the dataset as it was": STATE | {"length": 48},
    "with contexts_per_batch=2": STATE | {"contexts_per_batch": 2},
    "with seed=1, and this dataset has seed=0": STATE | {"seed": 1},
    "with shuffle=False": STATE | {"shuffle": False},
    "with shuffle=1,": STATE | {"shuffle": 1},
    "with last='pad'": STATE | {"last": "pad"},
    "counts the batches that were taken, 0 to 10, all that epochs=1 have, got -1": STATE | {"batches": -1},
    "epochs=1 have, got 11": STATE | {"batches": 11},
    "got 2.0": STATE | {"batches": 2.0},
    "got True": STATE | {"batches": True},
    "got '2'": STATE | {"batches": "2"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_wrong_state_is_refused_in_words(message: str):
    of = corpus.settings()
    index = Index(LENGTHS, of)
    assert batches_of(STATE, "d", index, of) == 2
    with pytest.raises(ValueError, match=message):
        batches_of(REFUSED[message], "d", index, of)


def test_a_state_is_json_that_says_what_the_run_is():
    of = corpus.settings(seed=np.int64(0), length=np.int32(LENGTH), ranks=2, rank=1, replicas=1)
    assert json.loads(state_of(np.int64(2), "d", Index(LENGTHS, of), of)) == STATE  # type: ignore[arg-type]


def test_less_than_a_batch_is_refused_and_padded_where_asked():
    with pytest.raises(ValueError, match=r"data holds 20 tokens, and one batch of 1 x 24 needs 24: pass last='pad'"):
        Index([20], corpus.settings())
    assert Index([20], corpus.settings(last="pad")).batches == 1


WRONG = {
    "folder must be the path of the folder": {"folder": 3},
    "folder must be the path of the folder of the data, a str or a Path, got None": {"folder": None},
    "unknown layout 'spiral': choose one of": {"layout": "spiral"},
    "unknown layout None": {"layout": None},
    "ranks must be an int, how many members": {"ranks": 2.0},
    "a ring needs at least 1 rank, got 0": {"ranks": 0},
    "rank=2 is not one of 2 ranks": {"ranks": 2, "rank": 2},
    "length must be an int of at least 1, got 0": {"length": 0},
    "length must be an int of at least 1, got '24'": {"length": "24"},
    "length=26 cannot be cut into 3 ranks in the layout 'zigzag', 2 equal runs a rank: .* 6, such as 24 or 30": {
        "length": 26,
        "ranks": 3,
    },
    "length=3 cannot be cut into 4 ranks .* multiple of 4, such as 4$": {"length": 3, "ranks": 4, "layout": "striped"},
    "batch_size must be an int of at least 1": {"batch_size": 0},
    "replica=2 is not one of 2 replicas: pass 0 to 1": {"replicas": 2, "replica": 2},
    "epochs must be an int of at least 1, got 0": {"epochs": 0},
    "seed must be an int": {"seed": 0.5},
    "shuffle must be True or False, got 1": {"shuffle": 1},
    "last must be 'drop' or 'pad'": {"last": "keep"},
    "pattern must name files inside of the folder": {"pattern": "/etc/*"},
    "end must be an id of at least 256, for the ids below are the bytes of the text": {"end": 10},
    "end must be an int of at least 0, got -1": {"end": -1, "tokenizer": "t.json"},
    "tokenizer must be the path": {"tokenizer": 3},
    "cache must be the path": {"cache": 3},
    "ignore_index must be an int": {"ignore_index": None},
}


@pytest.mark.parametrize("message", WRONG)
def test_arguments_that_do_not_fit_are_refused_in_words(message: str):
    options = {"folder": "data", **WRONG[message]}
    with pytest.raises(ValueError, match=message):
        corpus.settings(options.pop("folder"), **options)
