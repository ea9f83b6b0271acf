"""Conversion of the prompt to token ids, by a tokenizer or as bytes, and of new token ids to text as they arrive."""

from __future__ import annotations

import codecs
import unicodedata

from ring_attn_core.data.encoding import read_tokenizer

from .settings import GenerateSettings

BYTES = 256


class Text:
    """The prompt's token ids in ``ids``, and an incremental decoder of the new ids; without a tokenizer, ids are bytes.
    Special tokens are added only for folders in Hugging Face's format, because ``ring-attn train`` trains without them."""

    def __init__(self, settings: GenerateSettings) -> None:
        beside = settings.weights / "tokenizer.json"
        path = settings.tokenizer or (beside if beside.is_file() else None)
        self._tokenizer = None if path is None else read_tokenizer(lambda kind: kind.from_file(str(path)), str(path))
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
        """Add a token. Return the text that it completes; "" if it completes none, for example while a character lacks bytes."""
        if self._tokenizer is None:
            return self._bytes.decode(bytes([token])) if token < BYTES else ""
        self._new.append(token)
        context = max(0, self._shown - 8)  # some context, so that the space before a word is kept
        before, after = (self._tokenizer.decode(self._new[context:end]) for end in (self._shown, None))
        if after.endswith("\ufffd") or len(after) <= len(before):
            return ""
        self._shown = len(self._new)
        return after[len(before) :]

    def end(self) -> str:
        """Return U+FFFD, the replacement character, if ids are bytes and the last character lacks bytes. Else return ""."""
        return self._bytes.decode(b"", final=True) if self._tokenizer is None else ""


STEERS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
"""Unicode characters that change the writing direction of others."""


def harmless(text: str) -> str:
    """Escape the characters that control a terminal or the writing direction, except line breaks and tabs."""
    steers = lambda c: c not in "\n\t" and (unicodedata.category(c) == "Cc" or c in STEERS)
    return "".join(c.encode("unicode_escape").decode() if steers(c) else c for c in text)
