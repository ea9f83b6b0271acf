"""Chats with tools: transformers' texts and ids, labels on the assistant's calls but not on tools' answers, mistakes named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .test_chat import CHATML, theirs, tokenizer_in, tokens_of, write_rows

for package in ("tokenizers", "jinja2", "transformers"):
    pytest.importorskip(package)


CALLING = (
    "{%- if tools %}{{- '<|im_start|>system\n# Tools\n' }}{%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- for message in messages %}{%- if message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' }}BEGIN"
    "{%- if message.content is not none %}{{- message.content }}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}{%- set call = call.function or call %}"
    "{{- '<tool_call>\n' + {'name': call.name, 'arguments': call.arguments} | tojson + '\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\n' }}END{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
"""A template in the manner of Qwen2.5 and Hermes. BEGIN and END stand for the marks of the assistant's parts, or for nothing."""

UNMARKED = CALLING.replace("BEGIN", "").replace("END", "")


def marked() -> str:
    """Return the template with the assistant's parts marked."""
    head, rest = CALLING.split("BEGIN")
    body, tail = rest.split("END")
    labelled = f"{{% generation %}}{body}{{% endgeneration %}}"
    return f"{head}{{%- if message.role == 'assistant' %}}{labelled}{{%- else %}}{body}{{%- endif %}}{tail}"


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather <now> in a city, °C",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK: Any = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}},
}


def called(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


CHAT: list[Any] = [
    {"role": "user", "content": "How warm is it in Zürich, and how late?"},
    {"role": "assistant", "content": None, "tool_calls": [called("weather", city="Zürich"), called("clock", zone="CET")]},
    {"role": "tool", "content": "21", "tool_call_id": "call_weather"},
    {"role": "tool", "content": "noon", "tool_call_id": "call_clock"},
    {"role": "assistant", "content": "21 °C at noon."},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Any time"},
]
PLAIN: list[Any] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
TOOLS: list[Any] = [WEATHER, CLOCK]


def as_texts(chat: list[Any]) -> list[Any]:
    """Return the chat with the arguments of tool calls as JSON texts, as OpenAI's API has them."""
    copy = json.loads(json.dumps(chat))
    for call in (call for message in copy for call in message.get("tool_calls") or ()):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return copy


FORMS: dict[str, tuple[Any, Any, Any]] = {
    "lists": (CHAT, TOOLS, None),
    "texts": (as_texts(CHAT), json.dumps(TOOLS), None),
    "empty": (CHAT, TOOLS, []),
    "blank": (CHAT, json.dumps(TOOLS), " "),
}
"""A chat, its tools, and the tools of a chat without any, as rows have them."""


@pytest.mark.parametrize(
    ("form", "kind", "marks_parts"),
    [
        *((form, ".jsonl", False) for form in FORMS),
        ("lists", ".jsonl", True),
        ("lists", ".parquet", False),
        ("lists", ".arrow", True),
        ("blank", ".parquet", True),
    ],
)
def test_ids_and_labels_of_chats_with_tools_are_transformers(form: str, kind: str, marks_parts: bool, tmp_path: Path):
    tokenizer = tokenizer_in(tmp_path / "tokenizer", marked() if marks_parts else UNMARKED)
    marks = tokenizer_in(tmp_path / "marks", marked())
    chat, tools, none = FORMS[form]
    folder = write_rows(tmp_path / "data", [{"messages": chat, "tools": tools}, {"messages": PLAIN, "tools": none}], kind)
    want = [theirs(marks, chat, tools=of, return_assistant_tokens_mask=True) for chat, of in ((CHAT, TOOLS), (PLAIN, None))]
    for _ in range(2):  # tokenised, then from the cache
        ids, labels = tokens_of(folder, tokenizer=tokenizer, chat="assistant", length=2048)
        assert ids == [each["input_ids"] for each in want]
        for got, each in zip(labels, want, strict=True):
            mask = [*each["assistant_masks"][1:], 0]
            assert got == [x if has else -100 for x, has in zip([*each["input_ids"][1:], 0], mask, strict=True)]
    assert tokens_of(folder, tokenizer=tokenizer, chat="all", length=2048)[0] == ids


def test_only_the_assistants_words_and_calls_have_labels(tmp_path: Path):
    from tokenizers import Tokenizer

    tokenizer = tokenizer_in(tmp_path / "tokenizer", UNMARKED)
    folder = write_rows(tmp_path / "data", [{"messages": CHAT, "tools": TOOLS}])
    _, (labels,) = tokens_of(folder, tokenizer=tokenizer, chat="assistant", length=2048)
    decode = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).decode
    calls = [{"name": "weather", "arguments": {"city": "Zürich"}}, {"name": "clock", "arguments": {"zone": "CET"}}]
    written = "".join(f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls)
    want = [written, "21 °C at noon.", "Any time"]
    assert decode([x for x in labels if x != -100], skip_special_tokens=False) == "".join(f"{x}<|im_end|>\n" for x in want)


@pytest.mark.parametrize("in_a_file", [False, True])
def test_chats_with_tools_take_the_template_for_them(in_a_file: bool, tmp_path: Path):
    tokenizer = tokenizer_in(tmp_path / "tokenizer", CHATML)
    if in_a_file:
        (tokenizer / "chat_template.jinja").write_text(CHATML)
        (tokenizer / "additional_chat_templates").mkdir()
        (tokenizer / "additional_chat_templates" / "tool_use.jinja").write_text(UNMARKED)
    else:
        named = [{"name": "tool_use", "template": UNMARKED}, {"name": "default", "template": CHATML}]
        tokenizer = tokenizer_in(tokenizer, None, chat_template=named)
    folder = write_rows(tmp_path / "data", [{"messages": CHAT, "tools": TOOLS}, {"messages": PLAIN}])
    ids, labels = tokens_of(folder, tokenizer=tokenizer, chat="assistant", length=2048)
    assert ids == [theirs(tokenizer, chat, tools=of)["input_ids"] for chat, of in ((CHAT, TOOLS), (PLAIN, None))]
    alike = tokenizer_in(tmp_path / "alike", UNMARKED)
    assert tokens_of(folder, tokenizer=alike, chat="assistant", length=2048)[1] == labels


CALLS: Any = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [called("clock", zone="CET")]}]
WRONG: dict[str, tuple[str, Any, Any, str]] = {
    "tools left out": (CHATML, PLAIN, TOOLS, r"row 1: the chat template in .* leaves out the chat's 'tools': take a tokenizer"),
    "calls left out": (CHATML, CALLS, None, r"row 1: the chat template in .* leaves out the chat's 'tool_calls': take a"),
    "no JSON": (UNMARKED, PLAIN, "[weather]", r"row 1: 'tools' is a text that is not JSON \(.*\): pass a list of tools"),
    "a dict": (UNMARKED, PLAIN, WEATHER, r"row 1: 'tools' must be a list of tools such as .*, got dict"),
    "names": (UNMARKED, PLAIN, ["weather"], r"row 1: 'tools' must be a list of tools such as .*, got list"),
    "a text of a dict": (UNMARKED, PLAIN, json.dumps(WEATHER), r"row 1: 'tools' must be a list of tools such as .*, got '"),
    "a noncharacter": (UNMARKED, PLAIN, [{"name": "\ufdd1"}], r"row 1: a message or a tool holds U\+FDD0"),
    "a call": (
        UNMARKED,
        [PLAIN[0], PLAIN[1] | {"tool_calls": {"name": "clock"}}],
        None,
        r"row 1, message 2: 'tool_calls' must be a list such as .*, got dict",
    ),
    "arguments": (
        UNMARKED,
        [PLAIN[0], PLAIN[1] | {"tool_calls": [{"name": "clock", "arguments": "[1"}]}],
        None,
        r"row 1, message 2: the arguments of a tool call must be a JSON object, got '\[1': mend the row",
    ),
}


@pytest.mark.parametrize(("template", "chat", "tools", "words"), WRONG.values(), ids=WRONG)
def test_tools_that_make_no_text_are_refused_in_words(template: str, chat: Any, tools: Any, words: str, tmp_path: Path):
    tokenizer = tokenizer_in(tmp_path / "tokenizer", template)
    folder = write_rows(tmp_path / "data", [{"messages": chat, "tools": tools}])
    with pytest.raises(ValueError, match=words):
        tokens_of(folder, tokenizer=tokenizer, chat="assistant")
