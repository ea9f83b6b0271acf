"""Folders of texts and token arrays: every rank reads its part, and of many processes one tokenises, once."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest

from ring_attn_core import LAYOUTS
from ring_attn_core.data import cache as caching
from ring_attn_core.data import encoding

from ..support import corpus
from ..support.corpus import LENGTH, LENGTHS, RANKS
from ..support.flushed import Disk

ROOT = Path(__file__).resolve().parents[2]


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / ".ring-attn").iterdir() if path.name != ".lock")


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_read_their_parts_and_together_everything(layout: str, ranks: int, tmp_path):
    """Every token of the epoch is another one, so nothing can stand for anything else. Bytes are counted as they are read."""
    documents = corpus.write_arrays(tmp_path)
    options = {"layout": layout, "ranks": ranks, "last": "pad", "batch_size": 2}
    of_rank = [corpus.batches(tmp_path, rank=rank, **options) for rank in range(ranks)]
    held = [[arrays.ids[arrays.extents[..., 1] > 0] for arrays in each.iterate()] for each in of_rank]
    together = np.concatenate([ids for each in held for ids in each])
    assert sorted(together.tolist()) == sorted(token for ids in documents for token in ids)
    contexts = -(-sum(LENGTHS) // LENGTH)
    for each, ids in zip(of_rank, held, strict=True):
        own, runs = 2 * sum(map(len, ids)), len(each.settings.runs())
        most = 2 * own if layout == "striped" and ranks > 1 else own + 2 * contexts * runs
        assert own <= each.reader.bytes_read <= most


@pytest.mark.parametrize("dtype", ["|u1", "<u2", ">u2", "<i4", "<u4", "<i8", ">i8", "|i1"])
def test_token_arrays_of_every_integer_dtype_are_read_where_they_lie(dtype: str, tmp_path):
    documents = corpus.write_arrays(tmp_path, (20, 31, 46), dtype)
    data = corpus.batches(tmp_path, length=97, shuffle=False, layout="contiguous")
    assert next(data.iterate()).ids.tolist() == [[token for ids in documents for token in ids]]
    assert data.vocab is None
    assert not (tmp_path / ".ring-attn").exists()


@pytest.mark.parametrize(("end", "width", "vocab"), [(None, 1, 256), (256, 2, 257), (300, 2, 301), (70_000, 4, 70_001)])
def test_texts_are_their_bytes_and_what_ends_each(end: int | None, width: int, vocab: int, tmp_path):
    documents = corpus.write_texts(tmp_path)
    data = corpus.batches(tmp_path, end=end, length=1, shuffle=False, layout="contiguous", batch_size=len(LENGTHS), last="pad")
    ids = np.concatenate([arrays.ids for arrays in data.iterate()]).ravel()
    expected = [token for text in documents for token in (*text, *([] if end is None else [end]))]
    assert ids[: len(expected)].tolist() == expected
    assert data.vocab == vocab
    (tokens,) = (tmp_path / ".ring-attn").glob("*.tokens")
    assert tokens.stat().st_size == width * len(expected)


def test_texts_longer_than_a_chunk_are_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(encoding, "CHUNK", 3)
    text = "straße, 日本語 and 🙂 to the end"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    size = len(text.encode())
    data = corpus.batches(tmp_path, length=size, layout="contiguous")
    assert bytes(next(data.iterate()).ids[0].tolist()).decode() == text


def test_a_second_start_reads_no_text_and_equal_texts_are_one_file(tmp_path, monkeypatch):
    corpus.write_texts(tmp_path)
    first = corpus.batches(tmp_path)
    before = kept(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(caching, "_write", None)
        assert corpus.batches(tmp_path).state() == first.state()
    path = next(tmp_path.glob("0/*.txt"))
    os.utime(path, ns=(1, 1))  # as if copied from elsewhere: another index of the same tokens, and the state still fits
    assert corpus.batches(tmp_path).state() == first.state()
    assert len([name for name in kept(tmp_path) if name.endswith(".tokens")]) == 1
    assert len(kept(tmp_path)) == len(before) + 1
    path.write_bytes(path.read_bytes()[::-1])
    assert corpus.batches(tmp_path).state() != first.state()
    with pytest.raises(ValueError, match="are not those of this state"):
        corpus.batches(tmp_path).resume(first.state())


def test_a_damaged_cache_is_made_again(tmp_path):
    corpus.write_texts(tmp_path)
    state = corpus.batches(tmp_path).state()
    for name in kept(tmp_path):
        path = tmp_path / ".ring-attn" / name
        whole = path.read_bytes()
        for damaged in (b"", whole[:-1]):
            path.write_bytes(damaged)
            assert corpus.batches(tmp_path).state() == state
            assert path.read_bytes() == whole
        path.unlink()
        assert corpus.batches(tmp_path).state() == state
    assert not list((tmp_path / ".ring-attn").glob(".writing-*"))


def test_a_cache_of_ones_own_leaves_the_folder_alone(tmp_path):
    corpus.write_texts(tmp_path / "data")
    corpus.batches(tmp_path / "data", cache=tmp_path / "kept" / "here")
    assert len(list((tmp_path / "kept" / "here").glob("*.tokens"))) == 1
    assert not (tmp_path / "data" / ".ring-attn").exists()
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match=r"tokens cannot be kept in .*file.*: pass cache=, a folder that can be written"):
        corpus.batches(tmp_path / "data", cache=tmp_path / "file")


START = """
import sys
from pathlib import Path
from ring_attn_core.data import cache
written = cache._write
def counted(folder, *rest):
    with open(folder / "writers", "a") as file:
        file.write("x")
    return written(folder, *rest)
cache._write = counted
from parity_tests.support import corpus
print(corpus.batches(Path(sys.argv[1])).state())
"""


def test_one_of_many_processes_that_start_at_once_tokenises(tmp_path):
    corpus.write_texts(tmp_path, (300_000,) * 8)
    command = [sys.executable, "-c", START, str(tmp_path)]
    started = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    states = {process.communicate(timeout=100)[0] for process in started}
    assert len(states) == 1
    assert json.loads(states.pop())["batches"] == 0
    assert (tmp_path / ".ring-attn" / "writers").read_text() == "x"
    assert not list((tmp_path / ".ring-attn").glob(".writing-*"))


def test_a_process_waits_for_the_lock_of_another_that_tokenises(tmp_path):
    import fcntl

    corpus.write_texts(tmp_path)
    (tmp_path / ".ring-attn").mkdir()
    with open(tmp_path / ".ring-attn" / ".lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(target=corpus.batches, args=[tmp_path])
        second.start()
        second.join(0.3)
        assert second.is_alive()
        assert kept(tmp_path) == []
    second.join(30)
    assert len(kept(tmp_path)) == 2


@pytest.mark.skipif(sys.platform != "linux", reason="it asks Linux for the name of an open file")
def test_tokens_are_on_the_disk_before_an_index_says_so(tmp_path, monkeypatch):
    corpus.write_texts(tmp_path)
    disk, write, held = Disk().watch(monkeypatch), caching._write_index, []

    def written(index: Path, kept: dict[str, object]) -> None:
        held.extend(disk.holds(path) for path in index.parent.glob("*.tokens"))
        write(index, kept)

    monkeypatch.setattr(caching, "_write_index", written)
    corpus.batches(tmp_path)
    assert held == [True]


def test_a_dataset_that_was_sent_to_another_process_reads_the_same(tmp_path):
    corpus.write_texts(tmp_path, (20_000, 20_000))
    data = corpus.batches(tmp_path, length=2_400)
    next(data.iterate())  # so that a file is open
    sent = pickle.dumps(data)
    assert len(sent) < 10_000
    for mine, theirs in zip(pickle.loads(sent).iterate(), data.iterate(), strict=True):
        corpus.assert_same(mine, theirs)


def test_more_files_than_may_be_open_are_read_too(tmp_path):
    documents = corpus.write_arrays(tmp_path, [5] * 150)
    data = corpus.batches(tmp_path, length=750, shuffle=False, layout="contiguous")
    assert next(data.iterate()).ids.tolist() == [[token for ids in documents for token in ids]]
    assert len(data.reader._files) <= 64


class Words:
    """Stands for tokenizers.Tokenizer where that is not installed: a number for every word of a list."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    @staticmethod
    def from_buffer(text: bytes) -> Words:
        return Words(json.loads(text))

    def no_truncation(self) -> None: ...

    def no_padding(self) -> None: ...

    def get_vocab(self, with_added_tokens: bool) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    def encode(self, text: str, add_special_tokens: bool) -> types.SimpleNamespace:
        assert not add_special_tokens
        return types.SimpleNamespace(ids=[self.words.index(word) for word in text.split()])


@pytest.fixture
def words(tmp_path, monkeypatch) -> Path:
    monkeypatch.setitem(sys.modules, "tokenizers", types.SimpleNamespace(Tokenizer=Words))
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(["a", "b", "c", "d"]))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "1.txt").write_text("d a\nb a")
    (tmp_path / "data" / "2.txt").write_text("c c")
    return path


def test_a_tokenizer_makes_the_ids_and_its_contents_are_part_of_the_key(words: Path):
    folder = words.parent / "data"
    options = {"length": 6, "layout": "contiguous", "shuffle": False, "last": "pad"}
    data = corpus.batches(folder, tokenizer=words, **options)
    assert next(data.iterate()).ids.tolist() == [[3, 0, 1, 0, 2, 2]]
    assert data.vocab == 4
    assert next(corpus.batches(folder, tokenizer=words, end=9, **options).iterate()).ids.tolist() == [[3, 0, 1, 0, 9, 2]]
    assert corpus.batches(folder, tokenizer=words, end=9, **options).vocab == 10
    words.write_text(json.dumps(["b", "a", "c", "d"]))
    assert next(corpus.batches(folder, tokenizer=str(words), **options).iterate()).ids.tolist() == [[3, 1, 0, 1, 2, 2]]


def test_a_tokenizer_that_cannot_be_had_is_refused(words: Path, monkeypatch):
    folder = words.parent / "data"
    with pytest.raises(ValueError, match=r"tokenizer='nowhere.json' cannot be read .*: pass a tokenizer.json"):
        corpus.batches(folder, tokenizer="nowhere.json")
    (words.parent / "broken.json").write_text("{")
    with pytest.raises(ValueError, match=r"broken.json' is not a tokenizer.json of tokenizers"):
        corpus.batches(folder, tokenizer=words.parent / "broken.json")
    (folder / "3.txt").write_text("  \n")
    with pytest.raises(ValueError, match=r"3.txt makes no tokens"):
        corpus.batches(folder, tokenizer=words)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ModuleNotFoundError, match=r"tokenizer= needs tokenizers: run pip install 'ring-attn\[data\]'"):
        corpus.batches(folder, tokenizer=words)
    assert not list((folder / ".ring-attn").glob(".writing-*"))


def test_a_real_tokenizer_makes_the_ids(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 7, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("a b c b")
    data = corpus.batches(tmp_path, pattern="*.txt", tokenizer=tmp_path / "tokenizer.json", length=4)
    assert next(data.iterate()).ids.tolist() == [[0, 7, 2, 7]]
    assert data.vocab == 8
