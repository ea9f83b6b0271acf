"""Files, headers, ids and states that no reader should trust: named in a line, and never a hang."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from ..support import corpus
from ..support.special_files import DEEP, KINDS, in_time, put


@pytest.mark.parametrize("special", [kind for kind in KINDS if kind != "folder"])
@pytest.mark.parametrize("name", ["0000.npy", "a.txt", "dangling.txt"])
def test_a_special_or_vanished_file_is_named_and_never_waited_for(special, name, tmp_path):
    corpus.write_arrays(tmp_path) if name.endswith("npy") else corpus.write_texts(tmp_path)
    if name.startswith("dangling"):
        (tmp_path / name).symlink_to(tmp_path / "nowhere")
        expected = f"{name} has vanished"
    else:
        put(special, tmp_path / name)
        expected = f"{name} (is|cannot be read)"
    with in_time(), pytest.raises(ValueError, match=expected):
        corpus.batches(tmp_path)


@pytest.mark.parametrize("special", KINDS)
def test_a_tokenizer_or_lock_that_is_a_special_file_is_named(special, tmp_path):
    corpus.write_texts(tmp_path / "data")
    put(special, tmp_path / "tokenizer.json")
    with in_time(), pytest.raises(ValueError, match=r"tokenizer.json' cannot be read"):
        corpus.batches(tmp_path / "data", tokenizer=tmp_path / "tokenizer.json")
    (tmp_path / "cache").mkdir()
    put(special, tmp_path / "cache" / ".lock")
    with in_time(), pytest.raises(ValueError, match=r"cache"):
        corpus.batches(tmp_path / "data", cache=tmp_path / "cache")


def header(shape: str, descr: str = "'<u2'") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}"
    return b"\x93NUMPY\x02\x00" + len(text).to_bytes(4, "little") + text.encode() + bytes(200)


HEADERS = {
    "minus signs": header("(" + "-" * 5000 + "1,)"),
    "brackets": header("(" * 4000),
    "float": header("(2.5,)"),
    "text": header("'x'"),
    "text inside": header("('x',)"),
    "negative": header("-5"),
    "negative inside": header("(-5,)"),
    "bool": header("(True,)"),
    "list": header("[5]"),
    "set": header("{5}"),
    "nothing": header("()"),
    "no dict": b"\x93NUMPY\x01\x00\x02\x00[]" + bytes(99),
    "long": header("(5,)" + " " * 20_000),
    "version": b"\x93NUMPY\x09\x00\x02\x00[]" + bytes(99),
    "cut": b"\x93NUMPY\x01",
    "dtype": header("(5,)", "'O'"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_numpy_would_not_write_is_refused_in_a_line(name, tmp_path):
    (tmp_path / "b.npy").write_bytes(HEADERS[name])
    with pytest.raises(ValueError, match=r"b.npy is not an array of token ids") as raised:
        corpus.batches(tmp_path)
    assert len(str(raised.value)) < 500 + len(str(tmp_path))


@pytest.mark.parametrize("wrong", [2**31, 2**63, 2**63 + 5, 2**64 - 1])
def test_an_id_that_is_too_large_is_named_as_it_is(wrong, tmp_path):
    np.save(tmp_path / "b.npy", np.array([*range(47), wrong], np.uint64))
    with pytest.raises(ValueError, match=f"b.npy holds the id {wrong}: token ids are 0 to 2147483647"):
        list(corpus.batches(tmp_path).iterate())


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(depth):
        found = {"x": found}
    return found


@pytest.mark.parametrize("state", [DEEP, DEEP.encode(), '{"data": ' + DEEP + "}", b"\xff\xfe\xfd"], ids=range(4))
def test_a_state_that_cannot_be_read_is_refused(state, tmp_path):
    corpus.write_texts(tmp_path)
    with pytest.raises(ValueError, match=r"state must be what \.state\(\) returned, JSON, but it cannot be read"):
        corpus.batches(tmp_path).resume(state)


def test_a_state_that_was_read_already_may_be_nested_as_deeply_as_it_likes(tmp_path):
    corpus.write_texts(tmp_path)
    data = corpus.batches(tmp_path)
    for name in json.loads(data.state()):
        with pytest.raises(ValueError, match=r"state"):
            data.resume(json.loads(data.state()) | {name: nested(100_000)})
