"""Encoding of text files and files of rows: each document becomes token ids, packed as bytes for the cache."""

from __future__ import annotations

import codecs
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from ..validation import missing_package
from . import row_files
from .chat import ChatTemplate, Span, inside
from .documents import CHUNK, File, open_found
from .settings import BYTES, DatasetSettings

CODES = {1: "B", 2: "H", 4: "I"}
"""Type codes of the module ``array`` by the number of bytes of an id."""
ROWS = 1000
"""Largest number of rows that are encoded in one call of the tokenizer, which may use all cores for them."""


class Encoder:
    """The encoder of a dataset's files; without a tokenizer, the ids are bytes. ``vocab``: one more than the largest id."""

    def __init__(self, settings: DatasetSettings, tokenizer_text: bytes | None) -> None:
        self._settings = settings
        self._tokenizer = None
        if tokenizer_text is not None:
            make = lambda kind: kind.from_buffer(tokenizer_text)
            self._tokenizer = read_tokenizer(make, f"tokenizer={str(settings.tokenizer)!r}")
        self._template = None
        if settings.chat is not None and settings.tokenizer is not None:
            self._template = ChatTemplate(settings.tokenizer, parts=settings.marks_labels)
        largest = BYTES - 1
        if self._tokenizer is not None:
            largest = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=0)  # ids may have gaps
        self.vocab = max(largest, -1 if settings.end is None else int(settings.end)) + 1

    def encode(self, file: File, width: int, content: Any) -> Iterator[tuple[int, Iterable[bytes]]]:
        """Yield (row number, ids as pieces of bytes) for each document of a file, and update the hash ``content`` with the file.
        An id has ``width`` bytes, little-endian. A text is one document, at row 1. If ``settings.chat`` is "assistant", the
        highest bit is set in the ids of tokens without labels."""
        if not row_files.is_row_file(file):
            yield 1, self._text(file, width, content)
            return
        unlabelled, empty, labelled = 1 << (8 * width - 1), True, False
        rows = self._rows(file, content)
        while some := list(islice(rows, ROWS)):
            for (row, text, spans), tokens in zip(some, self._encode([text for _, text, _ in some]), strict=True):
                ids = text.encode() if tokens is None else tokens.ids
                if spans is not None and tokens is not None:
                    found = inside(tokens.offsets, spans)
                    labelled = labelled or any(found)
                    ids = [x if has else x | unlabelled for x, has in zip(ids, found, strict=True)]
                if ids:
                    empty = False
                    yield row, [_pack(ids, width)]
        if empty:
            what, column = "text" if self._template is None else "chat", self._settings.column
            raise ValueError(
                f"{file.path} has no row with a {what} in {column!r}: delete the file, or pass another pattern or column"
            )
        if self._settings.marks_labels and not labelled:
            raise ValueError(
                f'{file.path} has no token of an assistant, which alone have labels with chat="assistant": a message must have '
                'the role "assistant", a text, and no "weight" of 0; else pass chat="all"'
            )

    def _text(self, file: File, width: int, content: Any) -> Iterator[bytes]:
        chunks = _utf8(file, content)
        if self._tokenizer is None:
            yield from (_pack(chunk, width) for chunk in chunks)
            return
        ids = self._tokenizer.encode(b"".join(chunks).decode("utf-8"), add_special_tokens=False).ids
        if not ids:
            raise ValueError(
                f"{file.path} makes no tokens: a document has at least one, so delete the file or pass another pattern"
            )
        yield _pack(ids, width)

    def _rows(self, file: File, content: Any) -> Iterator[tuple[int, str, list[Span] | None]]:
        """Yield the number and the text of each row, with the spans that have labels, or None if all tokens have."""
        template, column = self._template, self._settings.column
        if template is None:
            return ((row, text, None) for row, text in row_files.texts(file, column, content))
        chats = row_files.chats(file, column, content)
        return ((row, *template.text_of(chat, f"{file.path}, row {row}")) for row, chat in chats)

    def _encode(self, texts: list[str]) -> list[Any]:
        return [None] * len(texts) if self._tokenizer is None else self._tokenizer.encode_batch(texts, add_special_tokens=False)


def read_tokenizer(make: Callable[[Any], Any], name: str) -> Any:
    """Return what ``make`` makes of the class Tokenizer. ``name``: begins the error if that is not a tokenizer.json."""
    try:
        from tokenizers import Tokenizer  # type: ignore[import-not-found]  # optional
    except ModuleNotFoundError as missing:
        raise missing_package("tokenizer=", "tokenizers", "data") from missing
    try:
        tokenizer = make(Tokenizer)
    except Exception as error:  # its Rust code raises several types
        raise ValueError(f"{name} is not a tokenizer.json of tokenizers: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _pack(ids: Sequence[int], width: int) -> bytes:
    if isinstance(ids, bytes):  # each byte is an id
        widened = bytearray(width * len(ids))
        widened[::width] = ids
        return bytes(widened)
    packed = array(CODES[width], ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _utf8(file: File, content: Any) -> Iterator[bytes]:
    """Yield the chunks of a file and update the hash ``content``. Raise ValueError if the file is not UTF-8 or has a 0 byte."""
    decoder, seen = codecs.getincrementaldecoder("utf-8")(), 0
    with open_found(file.path) as text:
        while chunk := text.read(CHUNK):
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


def _binary(file: File, why: str) -> ValueError:
    return ValueError(
        f"{file.path} is not text ({why}): convert it to UTF-8, save token ids with numpy.save as .npy, or pass a pattern that "
        "leaves it out, such as pattern='**/*.txt'"
    )
