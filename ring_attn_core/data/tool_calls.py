"""The tools of a chat and the calls of them in the form that chat templates read: lists and dicts instead of JSON texts."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..files import parse_json
from ..validation import in_words

TOOLS = "tools"
"""The column beside the chats with the tools that the assistant may call. A file may leave it out."""

CALLS = "tool_calls"
"""The field of an assistant's message with its calls, a list of dicts."""


class ChatRow(NamedTuple):
    """A chat as it stands in its row, unchecked: a list of messages, and the value of the column ``TOOLS`` or None."""

    messages: Any
    tools: Any


def tools_of(value: Any, where: str) -> list[dict[str, Any]] | None:
    """Return the tools of a row as a list of dicts, or None for a chat without tools.

    ``value``: the list or its JSON text. Raise ValueError if it is another value. ``where``: file and row, the first words of the
    error.
    """
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
    """Return a message with the arguments of its tool calls as dicts, for templates write them as JSON themselves.

    OpenAI's API has them as JSON text. Raise ValueError if the calls or their arguments are of another type. ``where``: file,
    row and message, the first words of the error.
    """
    calls = message[CALLS]
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(
            f'{where}: {CALLS!r} must be a list such as [{{"function": {{"name": ..., "arguments": {{...}}}}}}], '
            f"got {in_words(calls)}"
        )
    return message | {CALLS: [_with_arguments(call, where) for call in calls]}


def _with_arguments(call: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a tool call with its arguments as a dict. The name and the arguments lie in its "function" or in itself."""
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
