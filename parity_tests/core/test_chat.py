"""Chats of rows as documents: transformers' texts and ids, labels on the assistant's tokens, and every mistake named."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ring_attn_cli.train import data
from ring_attn_cli.train.config import Config, Data, Passkeys, RingConfig
from ring_attn_core.data.batches import documents_of
from ring_attn_core.data.chat import ChatRow, ChatTemplate, inside

from ..support import corpus

for package in ("tokenizers", "jinja2", "transformers"):
    pytest.importorskip(package)


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for message in messages %}\n    {%- if message.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ message.content | trim }}{{ eos_token }}{% endgeneration %}\n\n"
    "    {%- else %}<|im_start|>{{ message.role }}\n{{ message.content }}{{ eos_token }}\n{%- endif %}{% endfor %}"
    "{% if tools is not none %}{{ tools | tojson }}{% endif %}"
)
LATER = (
    "{% for message in messages %}{% if message.role == 'assistant' and not loop.last %}(shortened)"
    "{% else %}[{{ message.role }}]{{ message.content }}{% endif %}{% endfor %}"
)
REFUSING = "{% if messages[0].role == 'system' %}{{ raise_exception('no system, please') }}{% endif %}{{ messages[0].content }}"

CHATS: list[Any] = [
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi, straße 🙂?"},
        {"role": "assistant", "content": "Hello"},
    ],
    [],
    [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two 日本語 "},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": "four"},
    ],
    None,
    [{"role": "user", "content": "nobody answers"}],
]
ROWS = [1, 3, 5]
USER: Any = {"role": "user", "content": "x"}
ANSWER: Any = {"role": "assistant", "content": "two"}
SPECIAL = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "lstrip": False}}


def tokenizer_in(folder: Path, template: str | None = CHATML, **config: Any) -> Path:
    """Write a byte-level tokenizer with a few merges, and its chat template in tokenizer_config.json."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([json.dumps(CHATS, ensure_ascii=False)], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    known = SPECIAL | ({} if template is None else {"chat_template": template}) | config
    (folder / "tokenizer_config.json").write_text(json.dumps(known))
    return folder


def write(folder: Path, chats: list[Any] = CHATS, kind: str = ".jsonl") -> Path:
    return write_rows(folder, [{"messages": chat} for chat in chats], kind)


def write_rows(folder: Path, rows: list[dict[str, Any]], kind: str = ".jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if kind == ".jsonl":
        (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return folder
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet  # type: ignore[import-not-found]

    table = pa.Table.from_pylist(rows)
    if kind == ".parquet":
        parquet.write_table(table, folder / "chats.parquet")
    else:
        with pa.ipc.new_stream(folder / "chats.arrow", table.schema) as stream:
            stream.write_table(table)
    return folder


def tokens_of(folder: Path, **options: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Return ids and labels of each document, from one padded row that holds all of them."""
    options = {"length": 1024, "shuffle": False, "layout": "contiguous", "last": "pad", "column": "messages"} | options
    batches = corpus.batches(folder, **options)
    (arrays,) = batches.iterate()
    ends = np.cumsum([0, *(document.tokens for document in documents_of(batches.settings).documents)])
    both = [[x[0, begin:end].tolist() for begin, end in pairwise(ends)] for x in (arrays.ids, arrays.labels)]
    return both[0], both[1]


def theirs(folder: Path, chat: Any, **options: Any) -> Any:
    """Return what transformers makes of a chat."""
    import transformers

    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True, **options)


@pytest.mark.parametrize("kind", [".jsonl", ".parquet"])
@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["chatml", "marked"])
def test_ids_of_chats_are_transformers_ids(template: str, kind: str, tmp_path: Path):
    tokenizer, folder = tokenizer_in(tmp_path / "tokenizer", template), write(tmp_path / "data", kind=kind)
    for _ in range(2):  # tokenised, then from the cache
        ids, labels = tokens_of(folder, tokenizer=tokenizer, chat="all")
        assert ids == [theirs(tokenizer, CHATS[row - 1])["input_ids"] for row in ROWS]
        assert labels == [[*each[1:], -100] for each in ids]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_only_what_a_template_generates_has_labels(layout: str, ranks: int, tmp_path: Path):
    tokenizer, folder = tokenizer_in(tmp_path / "tokenizer", MARKED), write(tmp_path / "data")
    options: dict[str, Any] = {"tokenizer": tokenizer, "chat": "assistant", "ignore_index": -7}
    ids, labels = tokens_of(folder, **options)
    for row, got, of in zip(ROWS, labels, ids, strict=True):
        want = theirs(tokenizer, CHATS[row - 1], return_assistant_tokens_mask=True)
        assert of == want["input_ids"]
        assert got == [x if mask else -7 for x, mask in zip([*of[1:], 0], [*want["assistant_masks"][1:], 0], strict=True)]
    assert sum(x != -7 for x in labels[1]) > 4
    shared = [
        next(corpus.batches(folder, **options, length=1024, shuffle=False, last="pad", column="messages", **of).iterate())
        for of in ({}, *({"layout": layout, "ranks": ranks, "rank": rank} for rank in range(ranks)))
    ]
    for one in shared[1:]:
        np.testing.assert_array_equal(one.labels, shared[0].labels[np.arange(1)[:, None], one.positions])
        np.testing.assert_array_equal(one.ids, shared[0].ids[np.arange(1)[:, None], one.positions])


def test_without_marks_an_assistants_tokens_are_those_that_follow_its_prompt(tmp_path: Path):
    tokenizer, folder = tokenizer_in(tmp_path / "tokenizer"), write(tmp_path / "data")
    _, labels = tokens_of(folder, tokenizer=tokenizer, chat="assistant")
    from tokenizers import Tokenizer

    decode = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).decode
    texts = [decode([x for x in each if x != -100], skip_special_tokens=False) for each in labels]
    assert texts == ["Hello<|im_end|>\n", "two 日本語 <|im_end|>\nfour<|im_end|>\n", ""]


def test_a_vocabulary_that_fills_its_bytes_gets_another_for_the_mark(tmp_path: Path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = tokenizer_in(tmp_path / "tokenizer", "{% for x in messages %}{{ x.role }} {{ x.content }} {% endfor %}")
    folder = write(tmp_path / "data", [[{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]])
    for largest in (127, 128, 32_767, 32_768):
        made = Tokenizer(models.WordLevel({"user": 0, "assistant": 1, "x": largest}, "user"))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        made.save(str(tokenizer / "tokenizer.json"))
        assert tokens_of(folder, tokenizer=tokenizer, chat="assistant") == (
            [[0, largest, 1, largest]],
            [[-100, 1, largest, -100]],
        )


def test_a_token_counts_as_the_assistants_if_one_of_its_characters_does():
    offsets = [(0, 2), (2, 5), (5, 5), (5, 6), (6, 9), (9, 12)]
    assert inside(offsets, [(3, 6), (9, 10)]) == [False, True, False, True, False, True]
    assert inside(offsets, []) == [False] * 6


def test_a_template_may_lie_in_a_file_of_its_own_or_have_a_name(tmp_path: Path):
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": MARKED}]
    folder = tokenizer_in(tmp_path, None, chat_template=named)
    row = ChatRow([USER, ANSWER], None)
    assert (
        ChatTemplate(folder / "tokenizer.json", parts=True)
        .text_of(row, "row 1")[0]
        .startswith("<s><|im_start|>user\nx<|im_end|>")
    )
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    assert ChatTemplate(folder, parts=True).text_of(row, "row 1")[0].startswith("<|im_start|>user\nx<|im_end|>")
    folder, of = write(tmp_path / "data"), {"tokenizer": folder, "chat": "all"}
    before = tokens_of(folder, **of)
    (tmp_path / "chat_template.jinja").write_text(MARKED)
    assert tokens_of(folder, **of) != before  # another template is other data


WRONG: dict[str, tuple[str | None, Any, str]] = {
    "no template": (
        None,
        [USER],
        r"has no chat template, neither chat_template.jinja nor a \"chat_template\" in tokenizer_config",
    ),
    "no Jinja": ("{% if %}", [USER], r"row 1: the chat template in .* refuses it: Expected an expression"),
    "refused": (REFUSING, [{"role": "system", "content": ""}], r"row 1: the chat template in .* refuses it: no system, please"),
    "shortened": (LATER, CHATS[2], r"row 1: .* writes message 2 in another way if others follow, so .* pass chat=\"all\""),
    "a text": (CHATML, "hello", r"row 1: a chat must be a list of messages, got 'hello'"),
    "no role": (CHATML, [{"content": "x"}], r"row 1: a message must be like .*\"role\": \"user\".* got dict"),
    "a noncharacter": (CHATML, [{"role": "user", "content": "\ufdd0"}], r"row 1: a message or a tool holds U\+FDD0"),
    "half a letter": (CHATML, [{"role": "user", "content": "\ud800"}], r"row 1: the chat is not Unicode text"),
    "no assistant": (CHATML, [USER], r"chats.jsonl has no token of an assistant, which alone have labels"),
    "the sandbox": ("{{ messages.__class__.__mro__ }}", [USER], r"row 1: .* refuses it: access to attribute '__class__'"),
}


@pytest.mark.parametrize(("template", "chat", "words"), WRONG.values(), ids=WRONG)
def test_chats_that_make_no_tokens_are_refused_in_words(template: str | None, chat: Any, words: str, tmp_path: Path):
    tokenizer, folder = tokenizer_in(tmp_path / "tokenizer", template), write(tmp_path / "data", [chat])
    with pytest.raises(ValueError, match=words):
        tokens_of(folder, tokenizer=tokenizer, chat="assistant")


def test_a_tokenizer_config_that_is_not_an_object_is_named(tmp_path: Path):
    tokenizer, folder = tokenizer_in(tmp_path / "tokenizer"), write(tmp_path / "data")
    (tokenizer / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"transformers cannot read the tokenizer in .*: mend its files"):
        tokens_of(folder, tokenizer=tokenizer, chat="all")


def test_arguments_that_do_not_go_with_chats_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tokenizer, folder = tokenizer_in(tmp_path / "tokenizer"), write(tmp_path / "data")
    with pytest.raises(ValueError, match="chat must be one of all, assistant, the tokens with labels, got 'user'"):
        tokens_of(folder, tokenizer=tokenizer, chat="user")
    with pytest.raises(ValueError, match="chat= needs tokenizer="):
        tokens_of(folder, chat="all")
    with pytest.raises(ValueError, match="writes the end of a chat itself, got end=3: leave it out"):
        tokens_of(folder, tokenizer=tokenizer, chat="all", end=3)
    with pytest.raises(ValueError, match="has no column 'text': it has messages; pass column="):
        tokens_of(folder, tokenizer=tokenizer, chat="all", column="text")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("text")
    with pytest.raises(ValueError, match=r"chat='all' is for .jsonl, .parquet, .arrow files with a chat in each row"):
        tokens_of(tmp_path / "texts", tokenizer=tokenizer, chat="all", column="text")
    parquet = write(tmp_path / "parquet", kind=".parquet")
    with pytest.raises(ValueError, match="column 'messages' must hold texts, got list"):
        tokens_of(parquet, tokenizer=tokenizer)
    template, row = ChatTemplate(tokenizer, parts=False), ChatRow(CHATS[0], None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"chat= needs transformers: run pip install 'ring-attn\[data\]'"):
        template.text_of(row, "row 1")


def test_a_run_checks_its_chats_before_it_starts(tmp_path: Path):
    tokenizer = str(tokenizer_in(tmp_path / "tokenizer"))
    for name in ("train", "valid"):
        write(tmp_path / name, CHATS * 4)
    of: dict[str, Any] = {"folder": str(tmp_path), "pattern": "train/*.jsonl", "held_out": "valid/*.jsonl", "column": "messages"}
    of |= {"length": 32, "batch_size": 1, "tokenizer": tokenizer}
    make = lambda chat: Config(
        out=str(tmp_path / "run"),
        data=Data(**of, chat=chat),
        ring=RingConfig(ranks=2),
        passkey=Passkeys(lengths=()),
        model={"vocab": 300},
    )
    assert data.check(make("assistant")) == ""
    with pytest.raises(ValueError, match="chat must be one of all, assistant"):
        data.check(make("user"))
