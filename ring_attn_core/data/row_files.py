"""Files of rows, each row a document: JSON lines, Parquet, and Arrow files saved by Hugging Face's datasets.

JSON lines need the standard library only. pyarrow, imported on first use, reads Parquet and Arrow; datasets is not needed.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import Any

from ..files import parse_json
from ..validation import in_words, missing_package
from .chat import TOOLS, ChatRow
from .documents import CHUNK, File, open_found, update

LINES, PARQUET, ARROW = ".jsonl", ".parquet", ".arrow"
SUFFIXES = LINES, PARQUET, ARROW
BESIDE = "dataset_info.json", "state.json", "dataset_dict.json"
"""Metadata files that ``save_to_disk`` of Hugging Face's datasets writes beside the rows."""
ROWS = 1024


def is_row_file(file: File) -> bool:
    return file.name.endswith(SUFFIXES)


def without_descriptions(files: list[File]) -> list[File]:
    """Return ``files``. If any of them is an Arrow file, leave out the metadata files of Hugging Face's datasets (``BESIDE``)."""
    if not any(file.name.endswith(ARROW) for file in files):
        return files
    return [file for file in files if file.name.rpartition("/")[2] not in BESIDE]


def chats(file: File, column: str, content: Any) -> Iterator[tuple[int, ChatRow]]:
    """Yield the number (from 1) and the chat of each row that has one, and update the hash ``content`` with the file."""
    columns = [column, *([TOOLS] if column != TOOLS else [])]
    if file.name.endswith(LINES):
        rows = _of_lines(file, columns, content)
    else:
        rows = ((row, map(_drop_nulls, values)) for row, values in _of_arrow(file, columns, content, "lists of messages"))
    for row, (chat, *tools) in rows:
        if chat is not None and chat != []:
            yield row, ChatRow(chat, tools[0] if tools else None)


def _drop_nulls(value: Any) -> Any:
    """Return an Arrow value without null fields of dicts, which Arrow adds; dicts of a list, such as messages, keep theirs."""
    pruned = lambda x: _without_nulls(x) if isinstance(x, dict | list) else x
    if not isinstance(value, list):
        return pruned(value)
    return [{name: pruned(x) for name, x in each.items()} if isinstance(each, dict) else each for each in value]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(x) for name, x in value.items() if x is not None}
    return [_without_nulls(x) for x in value] if isinstance(value, list) else value


def texts(file: File, column: str, content: Any) -> Iterator[tuple[int, str]]:
    """Yield the number (from 1) and the text of each row that has one, and update the hash ``content`` with the file."""
    rows = _of_lines(file, [column], content) if file.name.endswith(LINES) else _of_arrow(file, [column], content)
    for row, (text,) in rows:
        if text is None or text == "":
            continue
        where = f"{file.path}, row {row}"
        if not isinstance(text, str):
            raise ValueError(f"{where}: {column!r} must be a text, got {in_words(text)}: pass the column of the texts")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where}: {column!r} is not Unicode text ({error.reason}): mend the row") from error
        yield row, text


def _of_lines(file: File, columns: Sequence[str], content: Any) -> Iterator[tuple[int, Any]]:
    """Yield the line number and the ``columns`` of each JSON object; only the first must exist. Update the hash ``content``."""
    with open_found(file.path) as raw, io.BufferedReader(raw, CHUNK) as lines:  # type: ignore[arg-type]
        for row, line in enumerate(lines, 1):
            content.update(line)
            if line.strip():
                yield row, _values(file, row, line, columns)


def _values(file: File, row: int, line: bytes, columns: Sequence[str]) -> list[Any]:
    where = f"{file.path}, line {row},"
    try:
        found = parse_json(line.decode("utf-8-sig" if row == 1 else "utf-8"))
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}; a file that ends in {LINES} has an object on each line") from error
    if not isinstance(found, dict):
        raise ValueError(f"{where} must be a JSON object, got {in_words(found)}")
    if columns[0] not in found:
        raise _without(where, columns[0], found)
    return [found.get(column) for column in columns]


def _without(where: str, column: str, names: Any) -> ValueError:
    return ValueError(f"{where} has no column {column!r}: it has {', '.join(map(str, names)) or 'none'}; pass column=")


def _of_arrow(file: File, columns: Sequence[str], content: Any, what: str = "texts") -> Iterator[tuple[int, Any]]:
    """Yield the number of each row of a Parquet or Arrow file, from 1, and its values in ``columns``.
    Only the first column must exist. ``what``: "texts" if it must hold strings, any other noun if lists. Update the hash
    ``content``."""
    try:
        import pyarrow as pa  # type: ignore[import-not-found]  # optional
    except ModuleNotFoundError as missing:
        raise missing_package(f"reading {file.name}", "pyarrow", "data") from missing
    update(content, file)
    row = 0
    try:
        with open_found(file.path) as rows:
            for batch in _batches(pa, file, rows, columns, what):
                held = [batch.column(column) if column in batch.schema.names else None for column in columns]
                for i in range(batch.num_rows):
                    row += 1
                    yield row, [None if values is None else values[i].as_py() for values in held]
    except pa.ArrowException as error:
        kind = "Parquet" if file.name.endswith(PARQUET) else "Arrow"
        raise ValueError(f"{file.path} cannot be read as {kind} ({error}): write it anew, or pass another pattern") from error


def _batches(pa: Any, file: File, rows: Any, columns: Sequence[str], what: str) -> Iterator[Any]:
    """Yield the record batches of an open file; all ``columns`` but the first may be missing. ``pa``: the package pyarrow."""
    column = columns[0]
    if file.name.endswith(PARQUET):
        import pyarrow.parquet as parquet  # type: ignore[import-not-found]

        found = parquet.ParquetFile(rows)
        schema = found.schema_arrow
        batches = lambda: found.iter_batches(ROWS, columns=[name for name in columns if name in schema.names])
    else:
        try:
            found = pa.ipc.open_stream(rows)  # the format that datasets writes
            schema, batches = found.schema, lambda: found
        except pa.ArrowInvalid:
            rows.seek(0)
            found = pa.ipc.open_file(rows)
            schema, batches = found.schema, lambda: (found.get_batch(i) for i in range(found.num_record_batches))
    if column not in schema.names:
        raise _without(file.path, column, schema.names)
    kind = schema.field(column).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    types = pa.types
    checks = (
        (types.is_string, types.is_large_string, types.is_string_view)
        if what == "texts"
        else (types.is_list, types.is_large_list)
    )
    if not any(check(kind) for check in (*checks, types.is_null)):
        raise ValueError(f"{file.path}: column {column!r} must hold {what}, got {kind}: pass column=, that of the {what}")
    yield from batches()
