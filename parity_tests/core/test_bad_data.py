"""Tests of the refusal of bad data, the same on every rank: empty, binary, vanished or changed files, empty folders."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from ring_attn_core.data import cache as caching

from ..support import corpus

BAD = {
    r"a.txt is empty: a document has at least one token": {"a.txt": b""},
    r"a.txt is not text \(byte 2 is 0\): convert it to UTF-8, save token ids": {"a.txt": b"ab\0c"},
    r"a.txt is not text \(no UTF-8 near byte 1\)": {"a.txt": b"a\xff\xfeb"},
    r"a.txt is not text \(it ends within a letter": {"a.txt": b"ab\xc3"},
    r"no file in .* fits pattern='\*\*/\*' \(hidden ones are left out\): put text files": {".hidden": b"text", ".git/x": b"text"},
    r"no file in .* fits": {},
    r"holds token arrays such as b.npy and texts such as a.txt: pass pattern='\*\*/\*.npy'": {"a.txt": b"text", "b.npy": b"x"},
    r"b.npy is not an array of token ids.*does not begin as numpy.save writes": {"b.npy": b"x"},
    r"b.npy is not an array of token ids.*its dtype is '<f4'": {"b.npy": np.zeros(9, "<f4")},
    r"b.npy is not an array of token ids, integers of one dimension": {"b.npy": np.zeros((3, 3), int)},
    r"b.npy is not an array of token ids.*its dtype is '\|b1'": {"b.npy": np.zeros(9, bool)},
    r"b.npy is empty": {"b.npy": np.zeros(0, int)},
    r"b.npy holds the id -1: token ids are 0 to 2147483647": {"b.npy": np.full(48, -1)},
    r"b.npy holds the id 2147483648": {"b.npy": np.full(48, 2**31)},
}


@pytest.mark.parametrize("message", BAD)
def test_invalid_data_are_refused_in_the_same_words_on_every_rank(message: str, tmp_path):
    for name, content in BAD[message].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        np.save(tmp_path / name, content) if isinstance(content, np.ndarray) else (tmp_path / name).write_bytes(content)
    said = set()
    for rank in range(2):
        with pytest.raises(ValueError, match=message) as raised:
            list(corpus.batches(tmp_path, ranks=2, rank=rank).iterate())
        said.add(str(raised.value))
    assert len(said) == 1
    assert not [path for path in tmp_path.glob(".ring-attn/*") if path.name != ".lock"]


def test_a_missing_folder_or_a_file_in_its_place_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist: pass a folder"):
        corpus.batches(tmp_path / "nowhere")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match="is a file: pass a folder"):
        corpus.batches(tmp_path / "a.txt")


def test_token_arrays_take_no_tokenizer_and_no_end(tmp_path):
    corpus.write_arrays(tmp_path)
    for options in ({"end": 256}, {"tokenizer": "t.json"}):
        with pytest.raises(ValueError, match=r"tokenizer= and end= are for texts, and .* holds token arrays such as 0000.npy"):
            corpus.batches(tmp_path, **options)


def test_data_that_vanish_or_change_under_way_are_refused(tmp_path):
    corpus.write_arrays(tmp_path)
    path = tmp_path / "0004.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    with pytest.raises(ValueError, match=r"0004.npy ends before its 100 tokens do"):
        corpus.batches(tmp_path)
    path.write_bytes(whole)
    written = path.stat().st_mtime_ns
    for rank in range(2):  # before anything is read: on the ranks that would have read it and on the others
        data = corpus.batches(tmp_path, ranks=2, rank=rank)
        path.unlink()
        with pytest.raises(ValueError, match=r"0004.npy has vanished: restore it, or make the dataset anew"):
            next(data.iterate())
        path.write_bytes(whole + b"00")
        with pytest.raises(ValueError, match=r"0004.npy had 328 bytes when the dataset was made and has 330"):
            next(data.iterate())
        path.write_bytes(whole)
        with pytest.raises(ValueError, match=r"0004.npy was written to after the dataset was made"):
            next(data.iterate())
        os.utime(path, ns=(written, written))  # as a copy that keeps times leaves it
        next(data.iterate())


@pytest.mark.parametrize("token", [0, -1])
def test_other_token_arrays_of_the_same_sizes_do_not_go_on_from_a_state(token: int, tmp_path):
    """Change an end of a token array: only the ends are compared, never all of it."""
    documents = corpus.write_arrays(tmp_path, (9_000, 9_000))
    state = corpus.batches(tmp_path).state()
    corpus.batches(tmp_path).resume(state)
    ids = np.array(documents[1], "<u2")
    ids[token] += 1
    np.save(tmp_path / "0001.npy", ids)
    with pytest.raises(ValueError, match="are not those of this state"):
        corpus.batches(tmp_path).resume(state)


def test_a_text_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    corpus.write_texts(tmp_path)
    checked = caching.is_unchanged
    monkeypatch.setattr(caching, "is_unchanged", lambda file: (Path(file.path).write_text("other"), checked(file)))
    with pytest.raises(ValueError, match=r"0.txt changed while it was read: begin again when it is written"):
        corpus.batches(tmp_path)
    monkeypatch.setattr(caching, "is_unchanged", lambda file: (Path(file.path).unlink(), checked(file)))
    with pytest.raises(ValueError, match=r"0.txt has vanished"):
        corpus.batches(tmp_path)
    assert [path.name for path in (tmp_path / ".ring-attn").iterdir()] == [".lock"]


def test_a_cache_among_the_documents_is_refused(tmp_path):
    corpus.write_texts(tmp_path)
    for cache in (tmp_path, tmp_path / "kept", str(tmp_path / "0" / ".." / "kept")):
        with pytest.raises(ValueError, match="lies in the folder of the data, where its files would be taken for documents"):
            corpus.batches(tmp_path, cache=cache)
    assert corpus.batches(tmp_path, cache=tmp_path / ".kept").state() == corpus.batches(tmp_path).state()
