"""Chats as texts: a tokenizer's chat template writes the messages of a row as one text and marks the assistant's parts.

A template is a program in Jinja. jinja2, imported on first use, runs it in its sandbox. It sees ``messages``,
``add_generation_prompt`` and special tokens such as ``bos_token``, as in transformers, but no ``strftime_now``: the date would
make other tokens every day. The text inside ``{% generation %}`` blocks is the assistant's. If a template has no such block, the
assistant's part is the text that the template adds for the message after the generation prompt.
"""

from __future__ import annotations

import json
import os
import re
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ..files import parse_json, read_bytes
from ..validation import in_words, missing_package

CHOICES = "all", "assistant"
"""The values of ``chat``: all tokens of a chat have labels, or only the assistant's."""

TEMPLATE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
"""The files beside a tokenizer.json that may hold its chat template."""

BEGIN, END = "\ufdd0", "\ufdd1"
"""Marks around the assistant's parts of a text while it is written: two noncharacters of Unicode, refused in messages."""

Span = tuple[int, int]
"""First and end of a part of a text, in characters."""


class TemplateFiles(NamedTuple):
    """The chat template and special tokens of a tokenizer. ``path``: the file that holds the ``template``."""

    path: str
    template: str
    special: tuple[tuple[str, str], ...]
    """The special tokens by name, such as ("eos_token", "</s>")."""


def template_files(tokenizer: str | os.PathLike[str]) -> TemplateFiles:
    """Read the chat template and the special tokens of a tokenizer.

    ``tokenizer``: a folder, or its file tokenizer.json. Raise ValueError if the folder has no readable chat template.
    """
    folder = Path(tokenizer)
    folder = folder if folder.is_dir() else folder.parent
    path, config = folder / TEMPLATE, folder / CONFIG
    try:
        settings = parse_json(read_bytes(config)) if config.exists() else {}
        template = read_bytes(path).decode() if path.exists() else settings.get("chat_template")
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"the chat template in {folder} cannot be read ({error}): mend {TEMPLATE} or {CONFIG}") from error
    if isinstance(template, list):  # several templates, each with a name
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default")
    if not isinstance(template, str):
        raise ValueError(
            f'the tokenizer in {folder} has no chat template, neither {TEMPLATE} nor a "chat_template" in {CONFIG}: take the '
            f"folder of a model that was trained on chats, or write {TEMPLATE} there"
        )
    text = lambda x: x.get("content") if isinstance(x, dict) else x
    special = {name: text(x) for name, x in settings.items() if name.endswith("_token")}
    found = tuple(sorted((name, x) for name, x in special.items() if isinstance(x, str)))
    return TemplateFiles(str(path if path.exists() else config), template, found)


class ChatTemplate:
    """A chat template that writes chats as texts. ``parts``: True to find the assistant's parts of each text too."""

    def __init__(self, files: TemplateFiles, parts: bool) -> None:
        self._files, self._parts = files, parts
        self._marked = bool(re.search(r"\{%[-+]?\s*generation\b", files.template))

    @cached_property
    def _template(self) -> Any:
        try:
            import jinja2.ext  # type: ignore[import-not-found]  # optional
            import jinja2.nodes  # type: ignore[import-not-found]
            import jinja2.sandbox  # type: ignore[import-not-found]
        except ModuleNotFoundError as missing:
            raise missing_package("chat=", "jinja2", "data") from missing

        class AssistantBlock(jinja2.ext.Extension):
            """The block ``{% generation %} ... {% endgeneration %}``, whose text is marked."""

            tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

            def _mark(self, caller: Any) -> str:
                return f"{BEGIN}{caller()}{END}"

        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        extensions = [AssistantBlock, jinja2.ext.loopcontrols]
        made = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        made.filters["tojson"] = lambda x, ensure_ascii=False, **how: json.dumps(x, ensure_ascii=ensure_ascii, **how)
        made.globals["raise_exception"] = refuse
        try:
            return made.from_string(self._files.template)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template of {self._files.path} is no Jinja ({error}): mend it") from error

    def text_of(self, chat: Any, where: str) -> tuple[str, list[Span] | None]:
        """Return (text, spans) of a chat: its text, and the spans of the assistant's parts in order, or None without ``parts``.

        Raise ValueError if the chat is not a list of messages, if the template refuses it, or if the assistant's parts cannot be
        located. ``where``: file and row, the first words of the error.
        """
        messages = _messages(chat, where)
        text, spans = _unmarked(self._write(messages, where))
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where}: the chat is not Unicode text ({error.reason}): mend the row") from error
        if not self._parts:
            return text, None
        return text, spans if self._marked else self._added(messages, text, where)

    def _write(self, messages: list[dict[str, Any]], where: str, prompt: bool = False) -> str:
        template = self._template
        tokens = dict(self._files.special)
        try:
            return template.render(messages=messages, tools=None, documents=None, add_generation_prompt=prompt, **tokens)
        except Exception as error:  # a template may raise any type
            raise ValueError(f"{where}: the chat template of {self._files.path} refuses it: {error}") from error

    def _added(self, messages: list[dict[str, Any]], text: str, where: str) -> list[Span]:
        """Return the span that each assistant's message adds to ``text``: render the chat up to the message, without and with it.

        Raise ValueError unless the text without the message begins the text with the message, and both begin ``text``.
        """
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._write(messages[:i], where, prompt=True)
            after = self._write(messages[: i + 1], where)
            if not (after.startswith(before) and text.startswith(after)):
                raise ValueError(
                    f"{where}: the chat template of {self._files.path} writes message {i + 1} in another way if others follow, "
                    "so the assistant's tokens cannot be told: put {% generation %} and {% endgeneration %} around them in the "
                    'template, or pass chat="all"'
                )
            spans.append((len(before), len(after)))
        return spans


def _messages(chat: Any, where: str) -> list[dict[str, Any]]:
    """Return the messages of a chat without their null fields. Raise ValueError if the chat is not a list of messages."""
    if not isinstance(chat, list) or not chat:
        raise ValueError(f"{where}: a chat must be a list of messages, got {in_words(chat)}: pass the column of the chats")
    for message in chat:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f'{where}: a message must be like {{"role": "user", "content": "..."}}, got {in_words(message)}')
    if BEGIN in (text := json.dumps(chat, ensure_ascii=False, default=str)) or END in text:
        raise ValueError(f"{where}: a message holds U+FDD0 or U+FDD1, which are no characters: leave them out")
    return [{name: x for name, x in message.items() if x is not None} for message in chat]


def _unmarked(text: str) -> tuple[str, list[Span]]:
    """Remove the marks BEGIN and END from a text. Return the text, and the spans that lay between a BEGIN and its END."""
    plain, spans, at = [], [], 0
    for piece in re.split(f"([{BEGIN}{END}])", text):
        if piece == BEGIN:
            spans.append((at, at))
        elif piece == END:
            spans[-1] = spans[-1][0], at
        else:
            plain.append(piece)
            at += len(piece)
    return "".join(plain), spans


def inside(offsets: list[Span], spans: list[Span]) -> list[bool]:
    """Return for each token whether any of its characters lies in one of ``spans``.

    ``offsets``: the span of each token's characters. ``offsets`` and ``spans`` are in order of the text.
    """
    found, at = [], 0
    for first, end in offsets:
        while at < len(spans) and spans[at][1] <= first:
            at += 1
        found.append(at < len(spans) and spans[at][0] < end and first < end)
    return found
