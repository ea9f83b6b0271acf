"""Models whose weights are float32 run under torch.autocast, as Trainer's bf16=True does, with the results of sdpa."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ring_attn_torch.transformers as hf
from ring_attn_core.reference.tolerance import relative_error

from .hugging_face import LENGTH, SMALL, VOCAB

pytestmark = pytest.mark.slow


def results(attention: str, dtype: torch.dtype, autocast: bool) -> list[Any]:
    """The logits of a small Llama and the gradients of its loss, as float64."""
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(LlamaConfig(**SMALL), attn_implementation=attention).to(dtype)
    ids = torch.randint(VOCAB, (2, LENGTH))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    return [x.detach().double().numpy() for x in (out.logits, *(p.grad for p in model.parameters()))]


def test_autocast_computes_as_sdpa_does():
    exact = results("eager", torch.float64, False)
    ring, plain = (results(attention, torch.float32, True) for attention in ("ring", "sdpa"))
    for truth, mine, theirs in zip(exact, ring, plain, strict=True):
        assert relative_error(mine, truth) <= 2 * relative_error(theirs, truth)


def test_generation_under_autocast_keeps_the_cache_in_its_dtype():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    with torch.autocast("cpu", torch.bfloat16), hf.sequence_parallel(model):
        found = model.generate(torch.tensor([[5, 6, 7]]), attention_mask=torch.ones(1, 3, dtype=torch.long), max_new_tokens=4)
    assert found.shape == (1, 7)
