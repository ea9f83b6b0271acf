"""Models that were refused, or failed, for a reason that was not the true one: each runs, or is refused for the true one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import ring_attn_torch.transformers as hf

from .hugging_face import SMALL

IDS = torch.arange(3, 29).reshape(2, 13)
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXPERTS |= {"shared_expert_intermediate_size": 16}


def test_a_model_without_windows_runs_though_its_config_says_a_window_of_0():
    torch.manual_seed(0)
    model: Any = transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**SMALL, **EXPERTS)).eval()
    assert model.config.sliding_window == 0
    want = model(input_ids=IDS, labels=IDS, use_cache=False)
    want.loss.backward()
    gradient = model.model.layers[0].self_attn.q_proj.weight.grad.clone()
    model.zero_grad()
    with hf.sequence_parallel(model, gather_logits=True):
        got = model(input_ids=IDS, labels=IDS)
        got.loss.backward()
        text = model.generate(IDS, max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert torch.allclose(got.logits, want.logits, atol=1e-5)
    assert torch.allclose(model.model.layers[0].self_attn.q_proj.weight.grad, gradient, atol=1e-6)
    assert torch.equal(text, model.generate(IDS, max_new_tokens=3, do_sample=False, eos_token_id=None))


def test_a_layer_with_a_window_of_0_is_refused_by_name():
    config = transformers.Qwen2MoeConfig(**SMALL, **EXPERTS, layer_types=["full_attention", "sliding_attention"])
    model: Any = transformers.Qwen2MoeForCausalLM(config)
    for layer in model.model.layers:
        layer.self_attn.layer_type = "sliding_attention"
    with (
        hf.sequence_parallel(model),
        pytest.raises(ValueError, match=r"Qwen2MoeAttention is a layer with a sliding window, .*=0"),
    ):
        model(input_ids=IDS)


def test_a_mask_that_is_computed_of_values_is_refused_when_the_model_is_met():
    model = transformers.DogeForCausalLM(transformers.DogeConfig(**SMALL))
    words = "DogeForCausalLM does not run over a ring: DogeAttention adds to its mask what it computes of every key's value"
    with pytest.raises(ValueError, match=words):
        hf.sequence_parallel(model).__enter__()


def test_an_encoder_with_a_decoder_is_refused_as_one_whatever_its_modules_are():
    sizes: dict[str, Any] = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes |= {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 48, "decoder_start_token_id": 3}
    config = transformers.WhisperConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    with pytest.raises(ValueError, match="WhisperConfig is of an encoder with a decoder, whose cross attention"):
        hf.enable(transformers.WhisperForConditionalGeneration(config))
