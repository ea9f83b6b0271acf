"""Mistakes in the use of sequence_parallel that torch would answer itself, on one rank or in words of its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import transformers

import ring_attn_torch.transformers as hf
from ring_attn_core.reference.tolerance import relative_error
from ring_attn_torch import Ulysses, attend_block, save_weights, sum_gradients
from ring_attn_torch.transformers import attention, masks
from ring_attn_torch.transformers.attention import ring_attention

from .hugging_face import VOCAB, in_float64, make
from .test_transformers_refusals import IDS, check_refused, message_of


@pytest.mark.slow
def test_an_id_outside_the_vocabulary_is_refused_on_every_rank(four: Any):
    """By torch alone, only the rank whose shard has it would fail, and the others would wait."""
    words = "input_ids hold {}, and a vocabulary of 48 has 0 to 47"
    wrong = {number: IDS.clone().index_fill_(1, torch.tensor([3]), number) for number in (48, 5000, -1)}
    check_refused(four, {str(number): ({"input_ids": ids}, words.format(number)) for number, ids in wrong.items()})


@pytest.mark.slow
def test_a_label_outside_the_vocabulary_is_refused_on_every_rank_by_logits_and_by_chunks(four: Any):
    for messages in four(2, strange_label):
        assert len(messages) == 2
        assert all(re.search("^rank [01]: labels hold 48, and a vocabulary of 48 has 0 to 47", each) for each in messages)


def strange_label(group: Any) -> list[str]:
    model, labels = make("llama", "float32"), IDS.clone().index_fill_(1, torch.tensor([3]), 48)
    messages = []
    for chunk in (None, 2):
        with hf.sequence_parallel(model, group, loss_chunk=chunk):
            messages.append(message_of(lambda: model(input_ids=IDS, labels=labels)))
    return messages


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_backward_outside_of_the_with_that_recomputes_layers_is_told_where_it_belongs(implementation: str):
    model = make("llama", "float32", implementation).train()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    with hf.sequence_parallel(model):
        loss = model(input_ids=IDS, labels=IDS).loss
    with pytest.raises(ValueError, match="call backward inside the with as well"):
        loss.backward()


ROWS = torch.randint(3, VOCAB, (2, 20), generator=torch.Generator().manual_seed(3))
ROW_LABELS = ROWS.masked_fill(torch.tensor([[False], [True]]) & (torch.arange(20) < 15), -100)
"""Labels of two rows, 20 and 5 of them: the mean over both rows is not the mean of their means."""


def gradients(model: Any) -> dict[str, Any]:
    return {name: p.grad.numpy().copy() for name, p in model.named_parameters()}


def of_two_rings(group: Any) -> tuple[str, dict[str, Any]]:
    """Return the error of the sum of two rings' means, and the gradients by the number of labels of both rings."""
    torch.set_grad_enabled(True)
    ring = [dist.new_group([i, i + 1]) for i in (0, 2)][group.rank() // 2]
    row = slice(group.rank() // 2, group.rank() // 2 + 1)
    model, given = make("llama"), {"input_ids": ROWS[row], "labels": ROW_LABELS[row]}
    with in_float64(), hf.sequence_parallel(model, ring):
        model(**given).loss.backward()
        message = message_of(lambda: sum_gradients(model, group))
        model.zero_grad()
        count = (given["labels"][:, 1:] != -100).sum()
        dist.all_reduce(count, group=group)
        model(**given, num_items_in_batch=count / ring.size()).loss.backward()
        sum_gradients(model, group)
    return message, gradients(model)


@pytest.mark.slow
def test_a_sum_of_the_means_of_two_rings_is_refused_and_by_all_labels_it_is_the_gradient_of_both_rows(four: Any):
    model = make("llama")
    with in_float64():
        model(input_ids=ROWS, labels=ROW_LABELS).loss.backward()
    exact = gradients(model)
    for message, got in four(4, of_two_rings):
        assert re.search(
            r"over ranks \[0, 1, 2, 3\], and the loss of LlamaForCausalLM was the mean over the labels of a", message
        )
        assert max(relative_error(got[name], x) for name, x in exact.items()) < 1e-12


def test_a_strategy_reaches_the_attention_of_every_layer(monkeypatch: pytest.MonkeyPatch):
    model, seen = make("llama", "float32"), []

    def recorded(*arguments: Any, **options: Any) -> Any:
        seen.append(options["strategy"])
        return ring_attention(*arguments, **options)

    monkeypatch.setattr("ring_attn_torch.transformers.attention.ring_attention", recorded)
    for strategy in ("gather", Ulysses(ranks=1)):
        with hf.sequence_parallel(model, strategy=strategy):
            model(input_ids=IDS)
    assert seen == ["gather", "gather", Ulysses(ranks=1), Ulysses(ranks=1)]
    with pytest.raises(ValueError, match="strategy"):
        hf.sequence_parallel(model, strategy="spiral").__enter__()


def test_an_order_reaches_the_attention_of_every_layer_and_no_cache(monkeypatch: pytest.MonkeyPatch):
    model, seen = make("llama", "float32"), []

    def recorded(*arguments: Any, **options: Any) -> Any:
        seen.append(options["order"])
        return ring_attention(*arguments, **options)

    monkeypatch.setattr("ring_attn_torch.transformers.attention.ring_attention", recorded)
    with hf.sequence_parallel(model, order="global"):
        model(input_ids=IDS)
        with pytest.raises(ValueError, match=r'cannot keep order="global"'):
            model.generate(IDS, max_new_tokens=1)
    assert seen == ["global", "global"]
    spiral, ring = {"order": "spiral"}, {"order": "global", "strategy": "ring"}
    cases: list[tuple[dict[str, Any], str]] = [(spiral, "order must be"), (ring, "cannot keep order")]
    for wrong, said in cases:
        with pytest.raises(ValueError, match=said):
            hf.sequence_parallel(model, **wrong).__enter__()


def test_weights_of_a_hugging_face_model_are_referred_to_save_pretrained(tmp_path: Path):
    with pytest.raises(ValueError, match=r"got LlamaForCausalLM. Save a model of transformers or PEFT by its save_pretrained"):
        save_weights(make("llama", "float32"), tmp_path / "saved")


def test_a_config_whose_model_attends_in_its_own_code_is_refused_before_the_model_is_made():
    with pytest.raises(ValueError, match="FalconModel computes attention in its own code and asks no attn_implementation"):
        hf.enable(transformers.FalconConfig())


def test_a_layer_that_reads_its_mask_as_a_tensor_is_told_that_it_has_none():
    """As the indexer of AXK2 does, outside of sequence_parallel, where no class is refused."""
    seen = masks.LayerMask(masks.CallRing(layout="contiguous"), masks.causal(), 9)
    assert seen[2] == 9
    with pytest.raises(ValueError, match="a layer reads its attention_mask as a tensor"):
        seen[:, 0, :, :]


def test_the_advice_for_attention_weights_gives_those_of_a_layer():
    """By attend_block, of the queries and keys of the first layer, what eager attention returns outside the ring."""
    model, ids = make("llama").eval(), torch.arange(3, 23).reshape(2, 10)
    with hf.sequence_parallel(model):
        message = message_of(lambda: model(input_ids=ids, output_attentions=True))
        with patch.object(attention, "ring_attention", wraps=attention.ring_attention) as layers:
            model(input_ids=ids)
    q, k = layers.call_args_list[0].args[:2]
    identity = torch.eye(10, dtype=k.dtype).expand(2, k.shape[2], 10, 10).transpose(1, 2)
    assert 'model.set_attn_implementation("eager") outside of it' in message
    assert "attend_block(q, k, v) with the identity as v" in message
    model.set_attn_implementation("eager")
    weights = model(input_ids=ids, output_attentions=True).attentions[0]
    torch.testing.assert_close(attend_block(q, k, identity)[0].transpose(1, 2), weights)


def test_the_line_of_the_error_for_prompts_padded_on_the_right_pads_them_on_the_left():
    model = make("llama").eval()
    input_ids, attention_mask = torch.arange(3, 15).reshape(2, 6), torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    given = {"input_ids": input_ids, "attention_mask": attention_mask}
    text = {"max_new_tokens": 3, "eos_token_id": None, "pad_token_id": 0}
    alone = model.generate(input_ids[1:, :4], **text)[0, 4:]
    with hf.sequence_parallel(model):
        line = message_of(lambda: model.generate(**given, **text)).partition("generate() wants: ")[2]
        exec(line, given)
        assert given["attention_mask"].tolist() == [[1] * 6, [0] * 2 + [1] * 4]
        got = model.generate(given["input_ids"], attention_mask=given["attention_mask"], **text)
    assert torch.equal(got[1, 6:], alone)
