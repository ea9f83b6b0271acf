"""Encoders of text files and files of rows. They convert each document to token ids, packed as bytes for the cache."""

from __future__ import annotations

import codecs
import os
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, BinaryIO

from ..files import open_file
from ..validation import missing_package
from . import row_files
from .chat import ChatTemplate, Span, inside
from .documents import CHUNK, File, vanished
from .settings import BYTES, DatasetSettings

CODES = {1: "B", 2: "H", 4: "I"}
"""Type codes of the module ``array`` by the number of bytes of an id."""
ROWS = 1000
"""Largest number of rows that are encoded in one call of the tokenizer, which may use all cores for them."""

Encode = Callable[[File, int, Any], Iterator[tuple[int, Iterable[bytes]]]]
"""A function ``encode(file, width, content)`` that yields (row number, ids as pieces of bytes) for each document of a file.

An id has ``width`` bytes, little-endian. A text is one document, at row 1. The hash ``content`` is updated with the whole file.
"""


def encoder(settings: DatasetSettings, tokenizer_text: bytes | None) -> tuple[Encode, int]:
    """Return the function that encodes a file (see ``Encode``), and the vocabulary size.
    Without ``tokenizer_text``, each byte is an id. If ``settings.chat`` is "assistant", the highest bit is set in the ids of
    tokens without labels."""
    end = -1 if settings.end is None else int(settings.end)
    if tokenizer_text is None:
        vocab, ids_of, pieces_of = max(BYTES, end + 1), _bytes_of_rows, _bytes
    else:
        tokenizer = _tokenizer(settings, tokenizer_text)

        def of_rows(texts: Sequence[str], width: int) -> list[bytes]:
            return [_packed(each.ids, width) for each in tokenizer.encode_batch(texts, add_special_tokens=False)]

        def of_text(file: File, width: int, content: Any) -> Iterator[bytes]:
            text = b"".join(_utf8(file, content)).decode("utf-8")
            yield _packed(tokenizer.encode(text, add_special_tokens=False).ids, width)

        largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)  # ids may have gaps
        vocab, ids_of, pieces_of = max(largest, end) + 1, of_rows, of_text

        if settings.chat is not None:
            return _chats(settings, tokenizer), vocab

    def encode(file: File, width: int, content: Any) -> Iterator[tuple[int, Iterable[bytes]]]:
        if row_files.is_row_file(file):
            rows = row_files.texts(file, settings.column, content)
            yield from _rows(file, settings.column, rows, lambda texts: ids_of(texts, width))
        else:
            yield 1, _checked(pieces_of(file, width, content), file)

    return encode, vocab


def _tokenizer(settings: DatasetSettings, text: bytes) -> Any:
    try:
        from tokenizers import Tokenizer  # type: ignore[import-not-found]  # optional
    except ModuleNotFoundError as missing:
        raise missing_package("tokenizer=", "tokenizers", "data") from missing
    try:
        tokenizer = Tokenizer.from_buffer(text)
    except Exception as error:  # its Rust code raises several types
        raise ValueError(f"tokenizer={os.fspath(settings.tokenizer)!r} is no tokenizer.json of tokenizers: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _packed(ids: Sequence[int], width: int) -> bytes:
    packed = array(CODES[width], ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _widened(text: bytes, width: int) -> bytes:
    """Return one id for each byte of a text: the value of the byte as ``width`` bytes, little-endian."""
    ids = bytearray(width * len(text))
    ids[::width] = text
    return bytes(ids)


def _bytes_of_rows(texts: Sequence[str], width: int) -> list[bytes]:
    return [_widened(text.encode(), width) for text in texts]


def _chats(settings: DatasetSettings, tokenizer: Any) -> Encode:
    """Return the function that encodes a file of chats with the tokenizer's chat template."""
    template, column = ChatTemplate(settings.tokenizer, parts=settings.marks_labels), settings.column

    def encode(file: File, width: int, content: Any) -> Iterator[tuple[int, Iterable[bytes]]]:
        unlabelled, labelled = 1 << (8 * width - 1), False

        def ids_of(chats: Sequence[tuple[str, list[Span] | None]]) -> list[bytes]:
            nonlocal labelled
            packed = []
            encoded = tokenizer.encode_batch([text for text, _ in chats], add_special_tokens=False)
            for tokens, (_, spans) in zip(encoded, chats, strict=True):
                ids = tokens.ids
                if spans is not None:
                    found = inside(tokens.offsets, spans)
                    labelled = labelled or any(found)
                    ids = [x if has else x | unlabelled for x, has in zip(ids, found, strict=True)]
                packed.append(_packed(ids, width))
            return packed

        chats = row_files.chats(file, column, content)
        rows = ((row, template.text_of(chat, f"{file.path}, row {row}")) for row, chat in chats)
        yield from _rows(file, column, rows, ids_of, "chat")
        if settings.marks_labels and not labelled:
            raise ValueError(
                f'{file.path} has no token of an assistant, which alone have labels with chat="assistant": a message must have '
                'the role "assistant", a text, and no "weight" of 0; else pass chat="all"'
            )

    return encode


def _rows(
    file: File, column: str, rows: Iterator[tuple[int, Any]], ids_of: Callable[[Sequence[Any]], list[bytes]], what: str = "text"
) -> Iterator[tuple[int, Iterable[bytes]]]:
    """Yield (row number, ids as bytes) for each row that has tokens. ``what``: the noun for a value in the error message."""
    empty = True
    while some := list(islice(rows, ROWS)):
        for (row, _), ids in zip(some, ids_of([value for _, value in some]), strict=True):
            if ids:
                empty = False
                yield row, [ids]
    if empty:
        raise ValueError(
            f"{file.path} has no row with a {what} in {column!r}: delete the file, or pass another pattern or column"
        )


def _checked(pieces: Iterable[bytes], file: File) -> Iterator[bytes]:
    """Yield ``pieces`` unchanged. Raise ValueError at the end if all are empty, because the text then has no tokens."""
    empty = True
    for piece in pieces:
        empty = empty and not piece
        yield piece
    if empty:
        raise ValueError(f"{file.path} makes no tokens: a document has at least one, so delete the file or pass another pattern")


def _bytes(file: File, width: int, content: Any) -> Iterator[bytes]:
    for chunk in _utf8(file, content):
        yield _widened(chunk, width)


def _utf8(file: File, content: Any) -> Iterator[bytes]:
    """Yield the chunks of a file and update the hash ``content``. Raise ValueError if the file is not UTF-8 or has a 0 byte."""
    decoder, seen = codecs.getincrementaldecoder("utf-8")(), 0
    with _opened(file) as opened:
        while chunk := opened.read(CHUNK):
            zero = chunk.find(b"\0")
            try:
                decoder.decode(chunk)
            except UnicodeDecodeError as error:
                raise _binary(file, f"no UTF-8 near byte {seen + error.start}") from error
            if zero >= 0:
                raise _binary(file, f"byte {seen + zero} is 0")
            seen += len(chunk)
            content.update(chunk)
            yield chunk
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise _binary(file, "it ends within a letter of UTF-8") from error


def _opened(file: File) -> BinaryIO:
    try:
        return open_file(file.path)
    except OSError as error:
        raise vanished(file.path, error) from error


def _binary(file: File, why: str) -> ValueError:
    return ValueError(
        f"{file.path} is no text ({why}): convert it to UTF-8, save token ids with numpy.save as .npy, or pass a pattern that "
        "leaves it out, such as pattern='**/*.txt'"
    )
