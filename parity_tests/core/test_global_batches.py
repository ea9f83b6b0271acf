"""The index of global batches: whole documents, a fixed number of microbatches, and the same ones after a resumption."""

from __future__ import annotations

import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ring_attn_core.data.global_batches import GlobalBatches
from ring_attn_core.data.index import batches_of, state_of

from ..support import corpus


def index_of(lengths: list[int], **changed: object) -> GlobalBatches:
    settings = corpus.settings(**{"length": 24, "layout": "balanced", "batch_tokens": 72, "last": "pad"} | changed)
    return GlobalBatches(lengths, settings)


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_document_of_an_epoch_is_whole_in_one_microbatch(shuffle):
    rng = np.random.default_rng(0)
    for seed in range(20):
        lengths = rng.integers(1, 25, int(rng.integers(1, 60))).tolist()
        index = index_of(lengths, seed=seed, shuffle=shuffle, epochs=2)
        assert index.end is not None and index.end % 3 == 0
        for epoch, numbers in enumerate((range(index.batches), range(index.batches, index.end))):
            found = []
            for number in numbers:
                (spans,) = index.batch(number)
                assert [span.begin for span in spans] == np.cumsum([0, *(span.count for span in spans)])[:-1].tolist()
                assert sum(span.count for span in spans) <= 24
                assert all(span.first == 0 and span.count == lengths[span.document] for span in spans)
                assert {span.document for span in spans} <= set(index.documents(number))
                found += [span.document for span in spans]
            assert sorted(found) == list(range(len(lengths))), epoch


def test_a_document_without_room_begins_the_next_global_batch():
    index = index_of([20, 20, 20, 4, 3, 9], shuffle=False)
    assert index.documents(0) == index.documents(2) == [0, 1, 2, 4 - 1, 4]
    assert index.documents(3) == [5] and index.batches == 6
    assert sorted(len(index.batch(number)[0]) for number in (3, 4, 5)) == [0, 0, 1]
    assert index_of([20, 20, 20, 4, 3, 9], shuffle=False, last="drop").batches == 3
    assert index_of([24] * 3, shuffle=False, last="drop").batches == 3
    assert index_of([24] * 3, shuffle=False).batches == 3


def test_documents_that_only_best_fit_can_place_are_placed():
    lengths = [14, 10, 13, 11, 12, 12]  # 72 tokens in 72 slots
    for seed in range(20):
        index = index_of(lengths, seed=seed, shuffle=False)
        assert index.batches == 3
        assert sorted(sum(span.count for span in index.batch(number)[0]) for number in range(3)) == [24] * 3


def test_threads_that_read_ahead_over_an_epochs_border_get_the_same_microbatches(monkeypatch):
    lengths = np.random.default_rng(2).integers(1, 25, 30).tolist()
    make = GlobalBatches._order_of

    def slowly(self, epoch):
        time.sleep(0.002)  # as many threads as possible are in here at once
        return make(self, epoch)

    monkeypatch.setattr(GlobalBatches, "_order_of", slowly)
    alone, shared = (index_of(lengths, epochs=None) for _ in range(2))
    numbers = range(4 * alone.batches)
    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(shared.batch, numbers)]
    assert found == [alone.batch(number) for number in numbers]


def test_another_order_of_access_or_a_pickled_index_gives_the_same_microbatches():
    rng = np.random.default_rng(1)
    lengths = rng.integers(1, 25, 50).tolist()
    index = index_of(lengths, epochs=3)
    assert index.end is not None
    expected = [index.batch(number) for number in range(index.end)]
    again = pickle.loads(pickle.dumps(index_of(lengths, epochs=None)))
    for number in reversed(range(index.end)):
        assert again.batch(number) == expected[number]
    assert len({str(each) for each in expected}) > index.batches  # epochs differ


def test_a_state_goes_on_in_the_middle_of_a_global_batch_and_not_with_another_size_of_it():
    settings = corpus.settings(length=24, layout="balanced", batch_tokens=72, last="pad")
    index, other = index_of([9] * 20), corpus.settings(length=24, layout="balanced", batch_tokens=48, last="pad")
    state = state_of(4, "d", index, settings)
    assert batches_of(state, "d", index, settings) == 4
    with pytest.raises(ValueError, match="this state is of a run with batch_tokens=72, and this dataset has batch_tokens=48"):
        batches_of(state, "d", index, other)
    with pytest.raises(ValueError, match="state must be what"):
        batches_of(state, "d", index, corpus.settings(length=24, layout="balanced", last="pad"))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"layout": "zigzag"}, "batch_tokens= needs layout=\"balanced\", which deals documents, got 'zigzag'"),
        ({"batch_size": 2}, "a microbatch is one row that all ranks share, got batch_size=2 and replicas=1"),
        ({"replicas": 2}, "got batch_size=1 and replicas=2: pass 1 of each, and let ranks be the number of all ranks"),
        ({"batch_tokens": 30}, "batch_tokens must be a multiple of length=24, the tokens of a microbatch, got 30"),
        ({"batch_tokens": 0}, "batch_tokens must be a multiple"),
        ({"ignore_index": 0}, "ignore_index=0 could be a token: pass a negative one"),
        ({"batch_tokens": 24.0}, "batch_tokens must be a multiple"),
        ({"length": 18, "ranks": 3, "batch_tokens": 36}, "has a document of 19 tokens, .* length=18: pass length=21 or more"),
        ({"last": "drop", "batch_tokens": 240}, "data holds 30 tokens, which do not fill one global batch of batch_tokens=240"),
    ],
)
def test_mistakes_are_refused(changed, said):
    with pytest.raises(ValueError, match=said):
        index_of([19, 11], **changed)
