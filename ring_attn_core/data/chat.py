"""Chats as texts: transformers writes the messages of a row with the tokenizer's chat template.

Its templates do not see ``strftime_now`` here, because a text with the date would have other tokens every day.

The module also finds the assistant's parts of a text: the parts that the template writes inside ``{% generation %}`` blocks. If
a template has no such block, each message of the assistant is a part, with the end of its turn. The generation prompt before a
message does not belong to the part. transformers' own mask of these blocks is wrong inside macros, so the blocks are replaced
by marks in the text.

Tools and tool calls may be JSON texts in a row; templates read lists and dicts.
"""

from __future__ import annotations

import json
import os
import re
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from ..files import parse_json, read_bytes
from ..validation import in_words, missing_package

TOOLS = "tools"
"""The optional column of a file of chats with the tools that the assistant may call."""

CALLS = "tool_calls"

CHOICES = "all", "assistant"
"""The values of ``chat``: all tokens of a chat have labels, or only the assistant's."""

FILES = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json", "additional_chat_templates/*.jinja"
"""The files beside a tokenizer.json that decide the text of a chat."""

BEGIN, END = "\ufdd0", "\ufdd1"
"""Marks around the assistant's parts of a text while it is written: two noncharacters of Unicode, refused in messages."""

BLOCK = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
"""The tags of a block ``{% generation %} ... {% endgeneration %}``."""

Span = tuple[int, int]
"""First and end (exclusive) of a part of a text, in characters."""


class ChatRow(NamedTuple):
    """The messages of a chat, and its tools or None, unchecked, as :func:`row_files.chats` reads them from a row of a file."""

    messages: Any
    tools: Any


def folder_of(tokenizer: str | os.PathLike[str]) -> Path:
    """Return the folder of a tokenizer, which is a folder or its file tokenizer.json."""
    return path if (path := Path(tokenizer)).is_dir() else path.parent


def template_files(tokenizer: str | os.PathLike[str]) -> list[tuple[str, str]]:
    folder = folder_of(tokenizer)
    try:
        return [(path.name, read_bytes(path).decode()) for name in FILES for path in sorted(folder.glob(name))]
    except (OSError, ValueError) as error:
        raise ValueError(f"the chat template in {folder} cannot be read ({error}): mend its files") from error


class ChatTemplate:
    """The chat template of a tokenizer. ``parts``: True to find the assistant's parts of each text too."""

    def __init__(self, tokenizer: str | os.PathLike[str], parts: bool) -> None:
        self._folder, self._parts = folder_of(tokenizer), parts

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            from transformers import PreTrainedTokenizerFast  # type: ignore[import-not-found]  # optional
        except ModuleNotFoundError as missing:
            raise missing_package("chat=", "transformers", "data") from missing
        try:
            found = PreTrainedTokenizerFast.from_pretrained(self._folder)
        except Exception as error:  # its files may be anything
            raise ValueError(f"transformers cannot read the tokenizer in {self._folder} ({error}): mend its files") from error
        if not found.chat_template:
            raise ValueError(
                f'the tokenizer in {self._folder} has no chat template, neither {FILES[0]} nor a "chat_template" in {FILES[1]}: '
                f"take the folder of a model that was trained on chats, or write {FILES[0]} there"
            )
        return found

    def text_of(self, row: ChatRow, where: str) -> tuple[str, list[Span] | None]:
        """Return a chat's text, and the spans with labels, None without ``parts=True``. ``where``: file and row, for errors."""
        chat = _check_chat(row, where)
        written = self._write(chat, where)
        self._check_tools(chat, written, where)
        text, spans = _remove_marks(written)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{where}: the chat is not Unicode text ({error.reason}): mend the row") from error
        if not self._parts:
            return text, None
        marked = BLOCK.search(self._tokenizer.get_chat_template(tools=chat.tools))
        turns = self._marked(chat, spans, where) if marked else self._added(chat, text, where)
        silent = {i for i in turns if chat.messages[i].get("weight") == 0}
        for i, parts in turns.items():
            if not parts and i not in silent and any(x for name, x in chat.messages[i].items() if name not in ("role", "weight")):
                raise ValueError(
                    f"{where}: the chat template in {self._folder} writes no token of message {i + 1} inside {{% generation %}}, "
                    'so the message would have no labels: mark it in the template, or give the message "weight": 0'
                )
        spans = spans if marked else [*chain(*turns.values())]
        unlabelled = {span for i in silent for span in turns[i]}
        return text, [span for span in spans if span not in unlabelled]

    def _write(self, chat: ChatRow, where: str, prompt: bool = False) -> str:
        """Return the text of a chat, with BEGIN and END around the blocks of the assistant."""
        mark = lambda tag: f"{{%{tag[1]} if true %}}{END if tag[2] else BEGIN}{{% endif {tag[3]}%}}"
        try:
            template = BLOCK.sub(mark, self._tokenizer.get_chat_template(tools=chat.tools))
            (text,) = self._tokenizer.apply_chat_template(
                [chat.messages],  # a batch of one may be an empty chat
                tools=chat.tools,
                chat_template="{% set strftime_now = undefined %}" + template,
                tokenize=False,
                add_generation_prompt=prompt,
            )
        except Exception as error:  # a template may raise any type
            raise ValueError(f"{where}: the chat template in {self._folder} refuses it: {error}") from error
        return text

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
                    f"{where}: the chat template in {self._folder} leaves out the chat's {what!r}: take a tokenizer whose "
                    f"template writes them, or leave {what!r} out of the rows"
                )

    def _marked(self, chat: ChatRow, spans: list[Span], where: str) -> dict[int, list[Span]]:
        """Return for each assistant message, by number, its spans among ``spans``: those that the message adds to their count."""
        count = lambda end: len(_remove_marks(self._write(chat._replace(messages=chat.messages[:end]), where))[1]) if end else 0
        assistant = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
        turns = {i: spans[count(i) : count(i + 1)] for i in assistant}
        if any(message.get("weight") == 0 for message in chat.messages) and [*chain(*turns.values())] != spans:
            raise self._untold(max(turns), where)
        return turns

    def _added(self, chat: ChatRow, text: str, where: str) -> dict[int, list[Span]]:
        """Return the span of each assistant message, by number, in ``text``, the text of the whole chat.
        It lies between the ends of the texts rendered before the message, with the generation prompt, and up to it, without; an
        end of turn (eos_token) that the template writes with the next message belongs to the span."""
        turns, ending = {}, self._tokenizer.eos_token or ""
        for i, message in enumerate(chat.messages):
            if message["role"] != "assistant":
                continue
            before = self._write(chat._replace(messages=chat.messages[:i]), where, prompt=True)
            after = self._write(chat._replace(messages=chat.messages[: i + 1]), where)
            if not (after.startswith(before) and text.startswith(after)):
                raise self._untold(i, where)
            end = len(after) + len(ending) * text.startswith(ending, len(after))
            turns[i] = [(len(before), end)] if len(after) > len(before) else []
        return turns

    def _untold(self, i: int, where: str) -> ValueError:
        return ValueError(
            f"{where}: the chat template in {self._folder} writes message {i + 1} in another way if others follow, so the "
            "assistant's tokens cannot be told: put {% generation %} and {% endgeneration %} around them in the template, or "
            'pass chat="all"'
        )


def _check_chat(row: ChatRow, where: str) -> ChatRow:
    """Return a chat in the form that templates read, without null fields of messages and empty lists of tool calls."""
    chat, tools = row.messages, tools_of(row.tools, where)
    if not isinstance(chat, list) or not chat:
        raise ValueError(f"{where}: a chat must be a list of messages, got {in_words(chat)}: pass the column of the chats")
    for message in chat:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f'{where}: a message must be like {{"role": "user", "content": "..."}}, got {in_words(message)}')
        if message.get("weight") not in (None, 0, 1):
            raise ValueError(f'{where}: the "weight" of a message must be 0 or 1, got {in_words(message["weight"])}')
    if BEGIN in (text := json.dumps([chat, tools], ensure_ascii=False, default=str)) or END in text:
        raise ValueError(f"{where}: a message or a tool holds U+FDD0 or U+FDD1, which are not characters: leave them out")
    messages = []
    for i, message in enumerate(chat):
        filled = {name: x for name, x in message.items() if x is not None and (name, x) != (CALLS, [])}
        messages.append(with_calls(filled, f"{where}, message {i + 1}") if CALLS in filled else filled)
    return ChatRow(messages, tools)


def _remove_marks(text: str) -> tuple[str, list[Span]]:
    """Remove the marks BEGIN and END from a text. Return the text, and the spans of characters between a BEGIN and its END."""
    plain, spans, at, begin = [], [], 0, 0
    for piece in re.split(f"([{BEGIN}{END}])", text):
        if piece == BEGIN:
            begin = at
        elif piece == END:
            spans += [(begin, at)] if begin < at else []
        else:
            plain.append(piece)
            at += len(piece)
    return "".join(plain), spans


def inside(offsets: list[Span], spans: list[Span]) -> list[bool]:
    """Return for each token whether any of its characters lies in one of the sorted ``spans``. ``offsets``: each token's span."""
    found, at = [], 0
    for first, end in offsets:
        while at < len(spans) and spans[at][1] <= first:
            at += 1
        found.append(at < len(spans) and spans[at][0] < end and first < end)
    return found


def tools_of(value: Any, where: str) -> list[dict[str, Any]] | None:
    """Return the tools of a chat, dicts or their JSON text, as a list of dicts; None without tools. ``where`` begins errors."""
    tools = value
    if isinstance(value, str):
        try:
            tools = parse_json(value) if value.strip() else None
        except ValueError as error:
            raise ValueError(f"{where}: {TOOLS!r} is a text that is not JSON ({error}): pass a list of tools") from error
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(
            f"{where}: {TOOLS!r} must be a list of tools such as "
            f'{{"type": "function", "function": {{"name": ..., "parameters": ...}}}}, got {in_words(value)}'
        )
    return tools


def with_calls(message: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a message with the JSON arguments of its tool calls as dicts, because templates convert dicts to JSON themselves."""
    calls = message[CALLS]
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(
            f'{where}: {CALLS!r} must be a list such as [{{"function": {{"name": ..., "arguments": {{...}}}}}}], '
            f"got {in_words(calls)}"
        )
    return message | {CALLS: [_with_arguments(call, where) for call in calls]}


def _with_arguments(call: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a tool call with its arguments parsed if they are text. They lie in ``call["function"]`` or in ``call``."""
    if isinstance(call.get("function"), dict):
        return call | {"function": _with_arguments(call["function"], where)}
    text = call.get("arguments")
    if not isinstance(text, str):
        return call
    try:
        arguments = parse_json(text) if text.strip() else {}
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}: the arguments of a tool call must be a JSON object, got {in_words(text)}: mend the row")
    return call | {"arguments": arguments}
