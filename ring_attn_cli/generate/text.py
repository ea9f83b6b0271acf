"""Text as token ids, by a tokenizer or byte by byte, and ids as text while they come."""

from __future__ import annotations

import codecs
import unicodedata
from pathlib import Path
from typing import Any

from .settings import Settings

BYTES = 256


class Text:
    """``ids``: those of the prompt. With ``--tokenizer``, or a tokenizer.json beside the weights; without one, its bytes.

    Special tokens, such as one for the beginning, are added for Hugging Face's folders alone: ``ring-attn train`` adds none.
    """

    def __init__(self, settings: Settings) -> None:
        beside = settings.weights / "tokenizer.json"
        path = settings.tokenizer or (beside if beside.is_file() else None)
        self._tokenizer = None if path is None else _read(path)
        text = settings.read_prompt()
        if self._tokenizer is None:
            self.ids = list(text.encode())
        else:
            self.ids = self._tokenizer.encode(text, add_special_tokens=settings.llama).ids
        settings.check_ids(self.ids, f"{settings.origin}, read {'as bytes' if path is None else f'by {path}'},")
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._new: list[int] = []
        self._shown = 0

    def add(self, token: int) -> str:
        """What can be read now that this token has come; characters may need several."""
        if self._tokenizer is None:
            return self._bytes.decode(bytes([token])) if token < BYTES else ""
        self._new.append(token)
        context = max(0, self._shown - 8)  # so that a space before a word is seen as one
        before, after = (self._tokenizer.decode(self._new[context:end]) for end in (self._shown, None))
        if after.endswith("\ufffd") or len(after) <= len(before):
            return ""
        self._shown = len(self._new)
        return after[len(before) :]

    def end(self) -> str:
        """What is left of a character that did not end."""
        return self._bytes.decode(b"", final=True) if self._tokenizer is None else ""


STEERS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Characters that change the order in which others are shown."""


def harmless(text: str) -> str:
    """Return ``text`` with control characters but line breaks and tabs as escapes, for a terminal would obey them."""
    steers = lambda c: c not in "\n\t" and (unicodedata.category(c) == "Cc" or c in STEERS)
    return "".join(c.encode("unicode_escape").decode() if steers(c) else c for c in text)


def _read(path: Path) -> Any:
    from tokenizers import Tokenizer  # type: ignore[import-not-found]  # optional

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # of no kind of its own
        raise ValueError(f"{path} is no tokenizer.json of tokenizers: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
