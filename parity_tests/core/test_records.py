"""Files of rows: JSON lines, Parquet and the Arrow files of datasets. Each row is a document, and every mistake is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ring_attn_core.data.batches import documents_of

from ..support import corpus

TEXTS = ["first", "", "straße, 日本語 and 🙂", None, "fourth\nand more", "fifth"]
ROWS = [1, 3, 5, 6]
"""Numbers of the rows that have a text."""
IDS = [list(TEXTS[row - 1].encode()) for row in ROWS]  # type: ignore[union-attr]
NEEDED = "Parquet and Arrow files need pyarrow: pip install 'ring-attn[data]'"
KINDS = [".jsonl", ".parquet", ".arrow", "feather.arrow", "dictionary.arrow"]


def write(folder: Path, kind: str, texts: list[Any] = TEXTS, column: str = "text") -> None:
    """Write one file of rows with another column beside that of the texts."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"data-{kind}"
    numbers = list(range(len(texts)))
    if kind == ".jsonl":
        lines = [json.dumps({"number": i, column: text}) for i, text in zip(numbers, texts, strict=True)]
        path.write_text("\n".join([*lines, "", "  "]))
        return
    pa = pytest.importorskip("pyarrow", reason=NEEDED)
    values = pa.array(texts)
    values = values.dictionary_encode() if kind == "dictionary.arrow" else values
    table = pa.table({"number": numbers, column: values})
    if kind == ".parquet":
        import pyarrow.parquet as parquet  # type: ignore[import-not-found]

        parquet.write_table(table, path, row_group_size=4)
        return
    make = pa.ipc.new_file if kind == "feather.arrow" else pa.ipc.new_stream
    with make(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)


def ids_of(folder: Path, **options: Any) -> list[list[int]]:
    """Return the ids of each document in the order of their names, read through batches of one token."""
    options = {"length": 1, "shuffle": False, "layout": "contiguous", "last": "pad"} | options
    data = corpus.batches(folder, **options)
    ids = [int(arrays.ids[0, 0]) for arrays in data.iterate()]
    ends = np.cumsum([document.tokens for document in documents_of(data.settings).documents])
    return [list(map(int, part)) for part in np.split(ids, ends[:-1])]


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_with_a_text_is_a_document(kind: str, tmp_path: Path):
    write(tmp_path, kind)
    for _ in range(2):  # tokenised, then from the cache
        assert ids_of(tmp_path) == IDS
    named = [document.name for document in documents_of(corpus.settings(tmp_path)).documents]
    assert named == [f"data-{kind}:{row}" for row in ROWS]
    assert ids_of(tmp_path, end=300) == [[*ids, 300] for ids in IDS]


@pytest.mark.parametrize("kind", [".jsonl", ".parquet"])
def test_another_column_is_other_data(kind: str, tmp_path: Path):
    write(tmp_path, kind, ["a question", "another"], column="prompt")
    assert ids_of(tmp_path, column="prompt")[0] == list(b"a question")
    with pytest.raises(ValueError, match=rf"data-{kind}.* has no column 'text': it has number, prompt; pass column="):
        corpus.batches(tmp_path)
    with pytest.raises(ValueError, match=r"'?number'? must.*(be a text|hold texts), got"):
        corpus.batches(tmp_path, column="number")


def test_two_columns_of_one_file_have_caches_of_their_own(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"question": "one", "answer": "two"}\n')
    assert [ids_of(tmp_path, column=name) for name in ("question", "answer")] == [[list(b"one")], [list(b"two")]]


def test_equal_rows_in_another_format_are_the_same_batches(tmp_path: Path):
    for kind in KINDS[:3]:
        write(tmp_path / kind[1:], kind)
    batches = [[arrays.ids.tolist() for arrays in corpus.batches(tmp_path / kind[1:], length=8).iterate()] for kind in KINDS[:3]]
    assert batches[0] == batches[1] == batches[2]


def test_a_run_resumes_on_rows_and_not_on_changed_ones(tmp_path: Path):
    write(tmp_path, ".jsonl", [letter * 9 for letter in "abcdefgh"])
    data = corpus.batches(tmp_path, length=8)
    whole = [arrays.ids.tolist() for arrays in data.iterate()]
    again = corpus.batches(tmp_path, length=8)
    again.resume(data.state(3))
    assert [arrays.ids.tolist() for arrays in again.iterate()] == whole[3:]
    write(tmp_path, ".jsonl", [letter * 9 for letter in "abcdefg"])
    with pytest.raises(ValueError, match="are not those of this state"):
        corpus.batches(tmp_path, length=8).resume(data.state(3))


def test_rows_are_encoded_by_a_tokenizer_whose_folder_is_passed(tmp_path: Path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.setattr("ring_attn_core.data.encoding.ROWS", 2)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 7, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "data", ".jsonl", ["a b", "  ", "b b c", "a", "", "b"])
    assert ids_of(tmp_path / "data", tokenizer=tmp_path) == [[0, 7], [7, 7, 2], [0], [7]]


def test_a_folder_that_datasets_saved_is_read_without_its_descriptions(tmp_path: Path):
    write(tmp_path / "train", ".arrow")
    for name in ("train/state.json", "train/dataset_info.json", "dataset_dict.json"):
        (tmp_path / name).write_text("{}")
    assert ids_of(tmp_path) == IDS


def test_datasets_itself_writes_what_is_read(tmp_path: Path):
    datasets = pytest.importorskip("datasets", reason="datasets writes what this test reads: pip install datasets")
    made = datasets.Dataset.from_dict({"number": list(range(6)), "text": TEXTS}).select([5, 4, 2, 0])
    datasets.DatasetDict({"train": made}).save_to_disk(tmp_path / "saved", num_shards={"train": 2})
    assert ids_of(tmp_path / "saved") == ids_of(tmp_path / "saved", pattern="train/*.arrow") == IDS[::-1]


BAD = {
    r"data-.jsonl, line 2, is not JSON: .*; a file that ends in .jsonl has an object on each line": b'{"text": "a"}\n{"text": \n',
    r"data-.jsonl, line 1, is not JSON: .*": b'\xff{"text": "a"}\n',
    r"data-.jsonl, line 1, must be a JSON object, got list": b"[1]\n",
    r"data-.jsonl, line 2, has no column 'text': it has txt; pass column=": b'{"text": "a"}\n{"txt": "a"}\n',
    r"data-.jsonl, row 2: 'text' must be a text, got 3": b'{"text": "a"}\n{"text": 3}\n',
    r"data-.jsonl, row 1: 'text' is not Unicode text": b'{"text": "\\ud800"}\n',
    r"data-.jsonl has no row with a text in 'text': delete the file, or pass": b'{"text": ""}\n\n{"text": null}\n',
    r"data-.parquet cannot be read as Parquet": b"PAR1, or so",
    r"data-.arrow cannot be read as Arrow": b"ARROW1 or so",
}


@pytest.mark.parametrize("message", BAD)
def test_an_invalid_file_of_rows_is_refused_in_the_same_words_on_every_rank(message: str, tmp_path: Path):
    name = message.split()[0].partition(",")[0]
    if not name.endswith("jsonl"):
        pytest.importorskip("pyarrow", reason=NEEDED)
    (tmp_path / name).write_bytes(BAD[message])
    said = set()
    for rank in range(2):
        with pytest.raises(ValueError, match=message) as raised:
            corpus.batches(tmp_path, ranks=2, rank=rank)
        said.add(str(raised.value))
    assert len(said) == 1


def test_rows_and_texts_in_one_folder_are_refused(tmp_path: Path):
    (tmp_path / "readme.txt").write_text("text")
    with pytest.raises(
        ValueError, match=r"column='prompt' is for .jsonl, .parquet, .arrow files, and .* holds texts such as readme"
    ):
        corpus.batches(tmp_path, column="prompt")
    write(tmp_path, ".jsonl")
    with pytest.raises(
        ValueError, match=r"files of rows such as data-.jsonl and texts such as readme.txt: pass pattern='\*\*/\*.jso"
    ):
        corpus.batches(tmp_path)
    with pytest.raises(ValueError, match=r"column must be the name of the column that holds the texts, got 3"):
        corpus.batches(tmp_path, column=3)


def test_missing_pyarrow_names_the_extra(tmp_path: Path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ModuleNotFoundError, match=r"reading a.parquet needs pyarrow: run pip install 'ring-attn\[data\]'"):
        corpus.batches(tmp_path)
