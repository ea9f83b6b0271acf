"""Tests of changed or invalid data of a dataset: both are noticed and named, and never cause a hang or a dead process."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from ring_attn_core.data import cache as caching
from ring_attn_core.files import BLOCK, SAMPLES, read_at, sample

from ..support import corpus
from ..support.special_files import DEEP

LARGE = 2 * SAMPLES * BLOCK
"""Tokens of 2 bytes in a file of which a sample leaves out three quarters."""


def large(folder: Path) -> Path:
    """A folder with one token array, of more bytes than all blocks of a sample."""
    corpus.write_arrays(folder, (LARGE,))
    return folder / "0000.npy"


def with_old_times(path: Path, write: Any) -> None:
    """Change a file and set its times back."""
    before = path.stat()
    write(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


def flip(path: Path, at: int, count: int = 2) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        old = file.read(count)
        file.seek(at)
        file.write(bytes(x ^ 1 for x in old))


@pytest.mark.filterwarnings("ignore:os.fork")  # JAX's own, where it was imported before
def test_an_array_that_shrinks_under_way_is_an_error_and_kills_nothing(tmp_path):
    """A mapped file that shrinks ends the process by SIGBUS, so the test is in a process of its own."""
    path = large(tmp_path)
    data = corpus.batches(tmp_path, shuffle=False)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            batches = data.iterate()
            next(batches)
            os.truncate(path, 4096)
            try:
                for _ in batches:
                    pass
            except ValueError as error:
                code = 0 if "0000.npy" in str(error) and "make the dataset anew" in str(error) else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_an_array_that_ends_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    large(tmp_path)
    data = corpus.batches(tmp_path)
    next(data.iterate())
    monkeypatch.setattr("ring_attn_core.data.reader.read_at", lambda file, offset, count: b"")
    with pytest.raises(ValueError, match=r"0000.npy ended while it was read"):
        next(data.iterate())


@pytest.mark.parametrize("how", ["rewritten", "edited", "edited, times set back", "replaced"])
def test_an_array_that_changes_under_way_is_an_error_at_the_next_batch(how, tmp_path):
    path = large(tmp_path / "data")
    data = corpus.batches(tmp_path / "data", shuffle=False)
    batches = data.iterate()
    first = next(batches)
    if how == "rewritten":
        path.write_bytes(path.read_bytes()[::-1])
    elif how == "edited":
        flip(path, 3 * BLOCK)  # a block that the sample leaves out
    elif how == "edited, times set back":
        with_old_times(path, lambda path: flip(path, 128))
    else:
        shutil.copy(path, tmp_path / "other.npy")
        flip(tmp_path / "other.npy", 128)
        os.utime(tmp_path / "other.npy", ns=(0, 0))
        os.replace(tmp_path / "other.npy", path)  # what is open stays as it was, and the next start names it
        corpus.assert_same(next(batches), next(_skipped(corpus.batches(tmp_path / "data", shuffle=False), 1)))
        batches = data.iterate()
    with pytest.raises(ValueError, match=r"0000.npy was written to after the dataset was made: make the dataset anew"):
        next(batches)
    assert first.ids.shape == (1, corpus.LENGTH)


def _skipped(data: Any, count: int) -> Any:
    batches = data.iterate()
    for _ in range(count):
        next(batches)
    return batches


@pytest.mark.parametrize("what", ["chmod", "link", "rename and back", "times set back"])
def test_a_file_with_the_same_content_is_unchanged(what, tmp_path):
    path = large(tmp_path / "data")
    data = corpus.batches(tmp_path / "data", shuffle=False)
    batches = data.iterate()
    first = next(batches)
    if what == "chmod":
        path.chmod(0o600)
    elif what == "link":
        os.link(path, tmp_path / "backup")
    elif what == "rename and back":
        path.rename(tmp_path / "backup")
        (tmp_path / "backup").rename(path)
    else:
        with_old_times(path, lambda path: None)
    next(batches)
    corpus.assert_same(first, next(data.iterate()))
    corpus.assert_same(first, next(pickle.loads(pickle.dumps(data)).iterate()))


def test_a_sample_has_the_first_and_the_last_byte_of_a_large_file(tmp_path):
    path, digests = large(tmp_path), set()
    for changed in ([], [0], [path.stat().st_size - 1]):
        for at in changed:
            flip(path, at, 1)
        with path.open("rb") as file:
            digests.add(sample(file))
    assert len(digests) == 3
    with path.open("rb") as file:
        assert len({sample(file, blocks) for blocks in (1, 2, 16)}) == 3


def test_partial_reads_are_put_together(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(bytes(range(100)))
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda number, count, offset: pread(number, min(count, 7), offset))
    with open(tmp_path / "a", "rb") as file:
        assert read_at(file, 10, 60) == bytes(range(10, 70))
        assert read_at(file, 90, 60) == bytes(range(90, 100))


def test_an_array_that_was_edited_in_its_middle_does_not_go_on_from_a_state(tmp_path):
    """As far as a sample sees it: every block of a small file, some of a large one."""
    path = large(tmp_path)
    state = corpus.batches(tmp_path).state()
    with_old_times(path, lambda path: flip(path, (path.stat().st_size - BLOCK) * 7 // (SAMPLES - 1)))
    with pytest.raises(ValueError, match="are not those of this state"):
        corpus.batches(tmp_path).resume(state)


def test_a_text_that_was_edited_with_its_size_and_times_kept_is_tokenised_anew(tmp_path):
    corpus.write_texts(tmp_path)
    before = corpus.batches(tmp_path).state()
    assert corpus.batches(tmp_path).state() == before
    with_old_times(tmp_path / "0" / "1.txt", lambda path: path.write_bytes(path.read_bytes()[::-1]))
    assert corpus.batches(tmp_path).state() != before


def test_a_text_of_the_same_content_is_read_once_and_not_tokenised_again(tmp_path, monkeypatch):
    """As after a copy or a chmod, in a cache that may be read only."""
    corpus.write_texts(tmp_path / "a")
    before = corpus.batches(tmp_path / "a").state()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "a" / "0" / "1.txt").chmod(0o600)
    monkeypatch.setattr(caching, "_write", None)
    read = []
    content = caching.content_of
    monkeypatch.setattr(caching, "content_of", lambda file: (read.append(file.name), content(file))[1])
    for _ in range(2):
        assert corpus.batches(tmp_path / "a").state() == before
    assert read == ["0/1.txt"]
    assert corpus.batches(tmp_path / "b").state() == before
    monkeypatch.setattr(caching, "_write_index", lambda *_: (_ for _ in ()).throw(PermissionError()))
    (tmp_path / "a" / "0" / "1.txt").chmod(0o644)
    assert corpus.batches(tmp_path / "a").state() == before


@pytest.mark.parametrize("damage", ["{}", "[]", "3", DEEP, '{"digest": "x", "width": "1", "tokens": [1]}', "\0"], ids=range(6))
def test_a_damaged_index_or_cache_is_made_anew(damage, tmp_path):
    corpus.write_texts(tmp_path)
    before = corpus.batches(tmp_path).state()
    (index,) = (tmp_path / ".ring-attn").glob("*.json")
    index.write_text(damage)
    assert corpus.batches(tmp_path).state() == before
    (tokens,) = (tmp_path / ".ring-attn").glob("*.tokens")
    whole = tokens.read_bytes()
    flip(tokens, 5)
    assert corpus.batches(tmp_path).state() == before
    assert tokens.read_bytes() == whole


def test_a_cache_that_changes_under_way_is_an_error_but_an_equal_copy_is_not(tmp_path):
    corpus.write_texts(tmp_path)
    data = corpus.batches(tmp_path, shuffle=False)
    (tokens,) = (tmp_path / ".ring-attn").glob("*.tokens")
    batches = data.iterate()
    next(batches)
    tokens.with_suffix(".new").write_bytes(tokens.read_bytes())
    os.replace(tokens.with_suffix(".new"), tokens)
    next(batches)
    next(data.iterate())
    data = corpus.batches(tmp_path, shuffle=False)
    batches = data.iterate()
    next(batches)
    flip(tokens, 30)
    with pytest.raises(ValueError, match="was written to after the dataset was made"):
        next(batches)


def test_files_of_a_killed_process_in_the_cache_are_deleted(tmp_path):
    corpus.write_texts(tmp_path)
    (tmp_path / ".ring-attn").mkdir()
    (tmp_path / ".ring-attn" / ".writing-abc").write_text("half")
    corpus.batches(tmp_path)
    assert not [*(tmp_path / ".ring-attn").glob(".writing-*")]
