"""Chats as texts: a tokenizer's chat template writes the messages of a row as one text.

A template is a program in Jinja. jinja2, imported on first use, runs it in a sandbox. The template sees ``messages``, ``tools``,
``add_generation_prompt`` and special tokens such as ``bos_token``, as in transformers. It does not see ``strftime_now``, because
a text with the date would have other tokens every day.

The module also finds the assistant's parts of a text: the parts that the template writes inside ``{% generation %}`` blocks. If
a template has no such block, each message of the assistant is a part. The generation prompt before a message does not belong to
the part.
"""

from __future__ import annotations

import json
import os
import re
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ..files import read_bytes, read_json
from ..validation import in_words, missing_package
from .tool_calls import CALLS, TOOLS, ChatRow, tools_of, with_calls

CHOICES = "all", "assistant"
"""The values of ``chat``: all tokens of a chat have labels, or only the assistant's."""

TEMPLATE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
"""The files beside a tokenizer.json that may hold its chat template."""

FOR_TOOLS = "tool_use"
"""The name of a template that transformers takes for chats with tools, if a tokenizer has several templates."""

BEGIN, END = "\ufdd0", "\ufdd1"
"""Marks around the assistant's parts of a text while it is written: two noncharacters of Unicode, refused in messages."""

Span = tuple[int, int]
"""First and end (exclusive) of a part of a text, in characters."""


class TemplateFiles(NamedTuple):
    """The chat template and special tokens of a tokenizer. ``path``: the file that holds the ``template``."""

    path: str
    template: str
    special: tuple[tuple[str, str], ...]
    """The special tokens by name, such as ("eos_token", "</s>")."""
    for_tools: str | None
    """The template of chats with tools; None if these chats also use ``template``."""


def template_files(tokenizer: str | os.PathLike[str]) -> TemplateFiles:
    """Read the chat template and the special tokens of a tokenizer.

    ``tokenizer``: a folder, or its file tokenizer.json. Raise ValueError if the folder has no readable chat template.
    """
    folder = Path(tokenizer)
    folder = folder if folder.is_dir() else folder.parent
    path, config, tool_use = folder / TEMPLATE, folder / CONFIG, folder / "additional_chat_templates" / f"{FOR_TOOLS}.jinja"
    try:
        for_tools = read_bytes(tool_use).decode() if tool_use.exists() else None
        settings = read_json(config) if config.exists() else {}
        template = read_bytes(path).decode() if path.exists() else settings.get("chat_template")
    except (OSError, ValueError) as error:
        raise ValueError(f"the chat template in {folder} cannot be read ({error}): mend {TEMPLATE} or {CONFIG}") from error
    if isinstance(template, list):  # several templates, each with a name
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template, for_tools = named.get("default"), for_tools or named.get(FOR_TOOLS)
    if not isinstance(template, str):
        raise ValueError(
            f'the tokenizer in {folder} has no chat template, neither {TEMPLATE} nor a "chat_template" in {CONFIG}: take the '
            f"folder of a model that was trained on chats, or write {TEMPLATE} there"
        )
    text = lambda x: x.get("content") if isinstance(x, dict) else x
    special = {name: text(x) for name, x in settings.items() if name.endswith("_token")}
    found = tuple(sorted((name, x) for name, x in special.items() if isinstance(x, str)))
    return TemplateFiles(str(path if path.exists() else config), template, found, for_tools)


class ChatTemplate:
    """A chat template that writes chats as texts. ``parts``: True to find the assistant's parts of each text too."""

    def __init__(self, files: TemplateFiles, parts: bool) -> None:
        self._files, self._parts = files, parts
        self._sources = files.template, files.for_tools or files.template

    @cached_property
    def _templates(self) -> tuple[Any, Any]:
        """The compiled templates of chats without tools and with tools."""
        try:
            import jinja2.ext  # type: ignore[import-not-found]  # optional
            import jinja2.nodes  # type: ignore[import-not-found]
            import jinja2.sandbox  # type: ignore[import-not-found]
        except ModuleNotFoundError as missing:
            raise missing_package("chat=", "jinja2", "data") from missing

        class AssistantBlock(jinja2.ext.Extension):
            """The block ``{% generation %} ... {% endgeneration %}``. Its text is written between the marks BEGIN and END."""

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
            return made.from_string(self._sources[0]), made.from_string(self._sources[1])
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template of {self._files.path} is no Jinja ({error}): mend it") from error

    def text_of(self, row: ChatRow, where: str) -> tuple[str, list[Span] | None]:
        """Return the text of a chat, and the spans of the assistant's parts in order (None without ``parts=True``).

        Raise ValueError if the chat, its tools or its tool calls are invalid, or if the assistant's parts cannot be located.
        Raise it also if the template is invalid, refuses the chat, or leaves out the chat's tools or tool calls. ``where``: the
        file and row of the chat. Error messages about the chat begin with this text.
        """
        chat = _checked(row, where)
        written = self._write(chat, where)
        self._check_tools(chat, written, where)
        text, spans = _unmarked(written)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where}: the chat is not Unicode text ({error.reason}): mend the row") from error
        if not self._parts:
            return text, None
        marked = re.search(r"\{%[-+]?\s*generation\b", self._sources[chat.tools is not None])
        return text, spans if marked else self._added(chat, text, where)

    def _write(self, chat: ChatRow, where: str, prompt: bool = False) -> str:
        template = self._templates[chat.tools is not None]
        arguments = dict(self._files.special) | chat._asdict() | {"documents": None, "add_generation_prompt": prompt}
        try:
            return template.render(**arguments)
        except Exception as error:  # a template may raise any type
            raise ValueError(f"{where}: the chat template of {self._files.path} refuses it: {error}") from error

    def _check_tools(self, chat: ChatRow, written: str, where: str) -> None:
        """Raise ValueError if the template writes the same text without the tools of the chat, or without its tool calls."""
        uncalled = [{name: x for name, x in message.items() if name != CALLS} for message in chat.messages]
        for what, without in ((TOOLS, chat._replace(tools=None)), (CALLS, chat._replace(messages=uncalled))):
            if without == chat:
                continue
            try:
                same = self._write(without, where) == written
            except ValueError:  # the template needs what was left out
                continue
            if same:
                raise ValueError(
                    f"{where}: the chat template of {self._files.path} leaves out the chat's {what!r}: take a tokenizer whose "
                    f"template writes them, or leave {what!r} out of the rows"
                )

    def _added(self, chat: ChatRow, text: str, where: str) -> list[Span]:
        """Return the span of each assistant message in ``text``, the text of the whole chat.

        A span does not contain the generation prompt. For each such message two texts are rendered: the earlier messages with
        the generation prompt, and the messages up to and including this message, without a prompt. The span lies between the
        ends of the two texts. Raise ValueError if the first text is not a prefix of the second, or the second text is not a
        prefix of ``text``.
        """
        spans = []
        for i, message in enumerate(chat.messages):
            if message["role"] != "assistant":
                continue
            before = self._write(chat._replace(messages=chat.messages[:i]), where, prompt=True)
            after = self._write(chat._replace(messages=chat.messages[: i + 1]), where)
            if not (after.startswith(before) and text.startswith(after)):
                raise ValueError(
                    f"{where}: the chat template of {self._files.path} writes message {i + 1} in another way if others follow, "
                    "so the assistant's tokens cannot be told: put {% generation %} and {% endgeneration %} around them in the "
                    'template, or pass chat="all"'
                )
            spans.append((len(before), len(after)))
        return spans


def _checked(row: ChatRow, where: str) -> ChatRow:
    """Return a chat in the form that templates read. Leave out null fields of messages, and empty lists of tool calls.

    Raise ValueError if the chat is not a list of messages, its tools or tool calls are invalid, or it holds U+FDD0 or U+FDD1,
    the marks BEGIN and END.
    """
    chat, tools = row.messages, tools_of(row.tools, where)
    if not isinstance(chat, list) or not chat:
        raise ValueError(f"{where}: a chat must be a list of messages, got {in_words(chat)}: pass the column of the chats")
    for message in chat:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f'{where}: a message must be like {{"role": "user", "content": "..."}}, got {in_words(message)}')
    if BEGIN in (text := json.dumps([chat, tools], ensure_ascii=False, default=str)) or END in text:
        raise ValueError(f"{where}: a message or a tool holds U+FDD0 or U+FDD1, which are no characters: leave them out")
    messages = []
    for i, message in enumerate(chat):
        filled = {name: x for name, x in message.items() if x is not None and (name, x) != (CALLS, [])}
        messages.append(with_calls(filled, f"{where}, message {i + 1}") if CALLS in filled else filled)
    return ChatRow(messages, tools)


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

    ``offsets``: the span of each token's characters. Both lists are sorted by position in the text. The span of a message without
    text is empty and contains no character. So a token around such a span is not inside it.
    """
    spans = [(begin, end) for begin, end in spans if begin < end]
    found, at = [], 0
    for first, end in offsets:
        while at < len(spans) and spans[at][1] <= first:
            at += 1
        found.append(at < len(spans) and spans[at][0] < end and first < end)
    return found
