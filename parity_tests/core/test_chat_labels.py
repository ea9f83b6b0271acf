"""The labels of chats: the assistant's tokens and its end token have labels, or the chat is refused in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ring_attn_core.data.chat import ChatRow, ChatTemplate

from ..support import corpus
from .test_chat import ANSWER, CHATML, MARKED, USER, theirs, tokenizer_in, tokens_of, write

for package in ("tokenizers", "jinja2", "transformers"):
    pytest.importorskip(package)


CALL: Any = {"role": "assistant", "tool_calls": [{"name": "call", "arguments": {}}]}
PARTLY = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.tool_calls %}{% for call in message.tool_calls %}"
    "{% generation %}<{{ call.name }}>{% endgeneration %}{% endfor %}{% generation %}<|im_end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>{% endif %}{% endfor %}"
)
MACRO = (
    "{% macro say(message) %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}{%- generation -%} "
    "{{ message.content }}<|im_end|>{% endgeneration %}{% else %}{{ message.content }}<|im_end|>{% endif %}{% endmacro %}"
    "{% for message in messages %}{{ say(message) }}{% endfor %}"
)
ENDS_LATER = (
    "{% for message in messages %}{% if not loop.first %}<|im_end|>{% endif %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}{% endfor %}{% if add_generation_prompt %}<|im_end|><|im_start|>assistant\n{% endif %}"
)

LABELLED: dict[str, tuple[str, Any, list[str]]] = {
    "a call marked, an answer not": (PARTLY, [USER, CALL, USER, ANSWER | {"weight": 0}], ["<call><|im_end|>"]),
    "marked, a weight of 0": (MARKED, [USER, ANSWER | {"weight": 0}, USER, ANSWER], ["two<|im_end|>"]),
    "unmarked, a weight of 0": (CHATML, [USER, ANSWER, USER, ANSWER | {"weight": 0}], ["two<|im_end|>\n"]),
    "a macro": (MACRO, [USER, ANSWER, USER, ANSWER], ["two<|im_end|>"] * 2),
    "the end with the next message": (ENDS_LATER, [USER, ANSWER, USER, ANSWER], ["two<|im_end|>", "two"]),
    "the assistant first": (CHATML, [ANSWER, USER], ["two<|im_end|>\n"]),
    "one without text": (MARKED, [USER, ANSWER | {"content": ""}], ["<|im_end|>"]),
}


@pytest.mark.parametrize(("template", "chat", "texts"), LABELLED.values(), ids=LABELLED)
def test_exactly_the_assistants_tokens_and_its_end_token_have_labels(template: str, chat: Any, texts: list[str], tmp_path: Path):
    tokenizer, folder = tokenizer_in(tmp_path / "tokenizer", template), write(tmp_path / "data", [chat])
    ((ids,), (labels,)) = tokens_of(folder, tokenizer=tokenizer, chat="assistant")
    from tokenizers import Tokenizer

    decode = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).decode
    assert decode([x for x in labels if x != -100], skip_special_tokens=False) == "".join(texts)
    assert ids == theirs(tokenizer, chat)["input_ids"]


def test_the_labels_of_a_global_batch_are_those_of_the_assistants_in_all_its_microbatches(tmp_path: Path):
    chats = [[USER, ANSWER] * times for times in (1, 3, 2, 1, 2)]
    tokenizer, folder = tokenizer_in(tmp_path / "tokenizer", MARKED), write(tmp_path / "data", chats)
    whole = {"layout": "balanced", "length": 128, "batch_tokens": 256, "last": "pad", "column": "messages"}
    data = corpus.batches(folder, tokenizer=tokenizer, chat="assistant", **whole)
    batches = list(data.iterate())
    assert len(batches) % 2 == 0
    for pair in zip(batches[::2], batches[1::2], strict=True):
        labels = sum(int((arrays.labels != -100).sum()) for arrays in pair)
        assert {arrays.batch_labels for arrays in pair} == {labels}
        assert 0 < labels < sum(int((arrays.extents[..., 1] > 0).sum()) for arrays in pair) / 2


def test_a_template_that_writes_the_date_gets_none(tmp_path: Path):
    dated = "{% if strftime_now is defined %}{{ strftime_now('%d %b') }}{% else %}no date{% endif %}" + CHATML
    text, _ = ChatTemplate(tokenizer_in(tmp_path, dated), parts=False).text_of(ChatRow([USER], None), "row 1")
    assert text == "no date<|im_start|>user\nx<|im_end|>\n"


WRONG: dict[str, tuple[str, Any, str]] = {
    "unmarked": (
        PARTLY,
        [USER, CALL, USER, ANSWER],
        r"row 1: .* no token of message 4 inside {% generation %}, .* \"weight\": 0",
    ),
    "two calls, no answer": (
        PARTLY,
        [USER, CALL | {"tool_calls": CALL["tool_calls"] * 2}, ANSWER],
        r"no token of message 3 inside",
    ),
    "nothing written": ("{{ messages[0].content }}", [USER, ANSWER], r"row 1: .* no token of message 2 inside {% generation %}"),
    "nothing marked": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{% endgeneration %}{% endif %}{{ m.content }}"
        "{% endfor %}",
        [USER, ANSWER],
        r"no token of message 2 inside {% generation %}",
    ),
    "half a weight": (CHATML, [USER, ANSWER | {"weight": 0.5}], r"row 1: the \"weight\" of a message must be 0 or 1, got 0.5"),
    "weights of 0": (
        MARKED,
        [USER, ANSWER | {"weight": 0}],
        r"the role \"assistant\", a text, and no \"weight\" of 0; else pass",
    ),
}


@pytest.mark.parametrize(("template", "chat", "words"), WRONG.values(), ids=WRONG)
def test_an_answer_that_would_have_no_labels_is_refused(template: str, chat: Any, words: str, tmp_path: Path):
    tokenizer, folder = tokenizer_in(tmp_path / "tokenizer", template), write(tmp_path / "data", [chat])
    with pytest.raises(ValueError, match=words):
        tokens_of(folder, tokenizer=tokenizer, chat="assistant")
