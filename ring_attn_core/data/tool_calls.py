"""Conversion of a chat's tools and tool calls to the form that chat templates read: lists and dicts instead of JSON texts."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..files import parse_json
from ..validation import in_words

TOOLS = "tools"
"""The optional column of a file of chats with the tools that the assistant may call."""

CALLS = "tool_calls"
"""The field of an assistant's message with the message's tool calls, a list of dicts."""


class ChatRow(NamedTuple):
    """The messages of a chat, and its tools or None, unchecked, as :func:`row_files.chats` reads them from a row of a file."""

    messages: Any
    tools: Any


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
    """Return a tool call with the JSON text of its arguments parsed to a dict; arguments that are not text stay.
    They are in ``call["function"]`` if that is a dict, else in ``call``."""
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
