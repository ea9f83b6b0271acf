"""Mistakes in the use of sequence_parallel that torch would answer itself, on one rank or in words of its own."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch

import ring_attn_torch.transformers as hf

from .hugging_face import make
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
