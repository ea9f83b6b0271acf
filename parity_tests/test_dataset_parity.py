"""SequenceShardedDataset of both packages: JAX = PyTorch to the bit, and both what shard_batch makes of the whole batch."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import ring_attn_jax as jax_package
import ring_attn_torch as torch_package
from ring_attn_core import LAYOUTS

from .support import corpus
from .support.corpus import LENGTH, RANKS

PACKAGES = {"jax": jax_package, "torch": torch_package}
BOTH = pytest.mark.parametrize("package", PACKAGES.values(), ids=PACKAGES)
OPTIONS = [
    {"batch_size": 2, "last": "pad", "restart_positions": True},
    {"shuffle": False, "ignore_index": -7, "epochs": 2, "batch_size": 3},
]


@pytest.mark.pairs
@pytest.mark.parametrize("options", OPTIONS, ids=["padded", "plain"])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_shards_are_those_of_shard_batch_in_both(layout: str, ranks: int, options: dict, tmp_path):
    documents = corpus.write_texts(tmp_path)
    whole = [batch for epoch in range(options.get("epochs", 1)) for batch in corpus.whole_batches(documents, epoch, **options)]
    given = {name: value for name, value in options.items() if name in ("restart_positions", "ignore_index")}
    for rank in (*range(ranks), None):
        both = [package.SequenceShardedDataset(tmp_path, LENGTH, layout, ranks, rank, **options) for package in PACKAGES.values()]
        for ours, theirs, (ids, of) in zip(*both, whole, strict=True):
            corpus.assert_same(ours, theirs)
            assert ours.length == theirs.length == LENGTH
            assert ours.key_mask is theirs.key_mask is None
            expected = torch_package.shard_batch(ids, layout, ranks, rank, documents=of, **given)
            corpus.assert_same(theirs, expected)
            assert [x.dtype for x in theirs[:4]] == [x.dtype for x in expected[:4]]  # type: ignore
            assert {str(x.dtype) for x in ours[:4]} == {"int32"}


@BOTH
def test_replicas_take_the_rows_of_one_batch_in_turn(package, tmp_path):
    documents = corpus.write_texts(tmp_path)
    parts = [package.SequenceShardedDataset(tmp_path, LENGTH, batch_size=2, replicas=2, replica=i) for i in range(2)]
    for first, second, (ids, _) in zip(*parts, corpus.whole_batches(documents, batch_size=4), strict=True):
        np.testing.assert_array_equal(np.concatenate([first.ids, second.ids]), ids)


@BOTH
def test_a_state_goes_from_one_framework_to_the_other(package, tmp_path):
    corpus.write_texts(tmp_path)
    (other,) = set(PACKAGES.values()) - {package}
    data = package.SequenceShardedDataset(tmp_path, LENGTH, epochs=None, seed=5)
    everything = iter(data)
    for _ in range(data.batches + 2):  # into the second epoch
        next(everything)
    resumed = other.SequenceShardedDataset(tmp_path, LENGTH, epochs=None, seed=5)
    resumed.resume(data.state())
    later = iter(resumed)
    for _ in range(data.batches):
        corpus.assert_same(next(later), next(everything))
    assert resumed.state() == data.state() == data.state(2 * data.batches + 2)
    assert data.vocab == 256
    assert data.bytes_read > 0


@BOTH
def test_mistakes_are_refused_in_both(package, tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        package.SequenceShardedDataset(tmp_path / "nowhere", LENGTH)
    corpus.write_texts(tmp_path)
    with pytest.raises(ValueError, match="length=23 cannot be cut into 2 ranks"):
        package.SequenceShardedDataset(tmp_path, 23, ranks=2)
    data = package.SequenceShardedDataset(tmp_path, LENGTH)
    with pytest.raises(ValueError, match=r"state must be what \.state"):
        data.resume("{}")
    with pytest.raises(ValueError, match=f"0 to {data.batches}, all that epochs=1 have, got {data.batches + 1}"):
        data.state(data.batches + 1)
    with pytest.raises(ValueError, match="got 'x'"):
        data.state("x")


def test_without_grain_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    corpus.write_texts(tmp_path)
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(ModuleNotFoundError, match=r"grain\(\) needs grain: run pip install grain"):
        jax_package.SequenceShardedDataset(tmp_path, LENGTH).grain()


def test_grain_gives_the_same_shards_and_goes_on_where_it_was(tmp_path):
    pytest.importorskip("grain")
    corpus.write_texts(tmp_path)
    data = jax_package.SequenceShardedDataset(tmp_path, LENGTH, ranks=2, rank=1, epochs=2)
    expected = list(data)
    data.resume(data.state(3))
    source = data.grain()
    assert len(source) == len(expected) - 3
    corpus.assert_same(source[0], expected[3])
    reader = iter(source.to_iter_dataset())
    for shard in expected[3:6]:
        corpus.assert_same(next(reader), shard)
    state = reader.get_state()
    again = iter(source.to_iter_dataset())
    again.set_state(state)
    for mine, theirs in zip(again, expected[6:], strict=True):
        corpus.assert_same(mine, theirs)
