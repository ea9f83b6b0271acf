"""Features of images that models add to several layers are split with their tokens, or refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional as F

import ring_attn_torch.transformers as hf
from ring_attn_core.reference.tolerance import relative_error
from ring_attn_torch import sum_gradients

from .hugging_face import HEADS, SMALL

pytestmark = pytest.mark.slow
ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2], "mrope_interleaved": True}
VISION: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "depth": 2, "num_heads": 2}
VISION |= {"patch_size": 4, "out_hidden_size": 32}
LENGTH = 27


def qwen3_vl() -> Any:
    kind: Any = transformers.Qwen3VLConfig
    config = kind(
        text_config={**SMALL, **HEADS, "rope_parameters": ROPE},
        vision_config={**VISION, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    return transformers.Qwen3VLForConditionalGeneration(config).train()


def given(model: Any) -> dict[str, Any]:
    """Two rows with images of 7 and 9 tokens, each of which gets something more in both layers."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, SMALL["vocab_size"], (2, LENGTH), generator=generator)
    mask = torch.zeros(2, LENGTH, dtype=torch.bool)
    mask[0, 3:10] = mask[1, 15:24] = True
    features = [torch.randn(16, SMALL["hidden_size"], generator=generator) for _ in range(2)]
    return {
        "inputs_embeds": model.get_input_embeddings()(ids),
        "position_ids": torch.randint(0, 40, (3, 2, LENGTH), generator=generator),
        "visual_pos_masks": mask,
        "deepstack_visual_embeds": [x.requires_grad_() for x in features],
        "labels": ids,
    }


def outcome(model: Any, loss: Any, features: list[Any]) -> dict[str, np.ndarray]:
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().numpy(), **gradients} | {f"feature {i}": x.grad.numpy() for i, x in enumerate(features)}


def test_features_of_images_are_added_where_their_tokens_are(four: Any):
    """Loss and gradients, of the features too, of one process, which hands them to the text's model itself."""
    model = qwen3_vl()
    call = given(model)
    labels = call.pop("labels")
    hidden = model.model.language_model(**call, use_cache=False).last_hidden_state
    loss = F.cross_entropy(model.lm_head(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    want = outcome(model, loss, call["deepstack_visual_embeds"])
    for got, hidden_too in four(4, on_a_ring):
        assert {name: x for name in want if (x := relative_error(got[name], want[name])) > 1e-4} == {}
        assert relative_error(hidden_too, hidden.detach().numpy()) < 1e-5


def on_a_ring(group: Any) -> tuple[dict[str, np.ndarray], np.ndarray]:
    torch.set_grad_enabled(True)
    model = qwen3_vl()
    call = given(model)
    with hf.sequence_parallel(model, group):
        loss = model(**call).loss
        loss.backward()
    sum_gradients(model, group)
    for x in call["deepstack_visual_embeds"]:
        torch.distributed.all_reduce(x.grad, group=group)
    text = model.model.language_model
    with hf.sequence_parallel(text, group, gather_logits=True), torch.no_grad():
        hidden = text(**{name: x for name, x in call.items() if name != "labels"}).last_hidden_state
    return outcome(model, loss, call["deepstack_visual_embeds"]), hidden.numpy()


def test_embeddings_without_the_features_that_belong_to_them_are_refused(four: Any):
    for messages in four(2, refused):
        alone, mask, rows, ids = messages
        assert "Qwen3VLForConditionalGeneration adds features of images to the hidden states of its first layers" in alone
        assert "visual_pos_masks must be [2, 27]" in mask
        assert "deepstack_visual_embeds[1] must be [16, 32], a row for each True" in rows
        assert "visual_pos_masks [batch, length], True for tokens of images" in ids


def refused(group: Any) -> list[str]:
    model, messages = qwen3_vl(), []
    call = given(model)
    features = call["deepstack_visual_embeds"]
    alone = {name: call[name] for name in ("inputs_embeds", "position_ids", "labels")}
    tries = [
        alone,
        call | {"visual_pos_masks": call["visual_pos_masks"][:, 1:]},
        call | {"deepstack_visual_embeds": [features[0], features[1][1:]]},
        {"input_ids": call["labels"], "visual_pos_masks": call["visual_pos_masks"]},
    ]
    with hf.sequence_parallel(model, group), torch.no_grad():
        for each in tries:
            with pytest.raises(ValueError, match=r".") as error:
                model(**each)
            messages.append(str(error.value))
        text = alone | {"visual_pos_masks": torch.zeros_like(call["visual_pos_masks"]), "deepstack_visual_embeds": []}
        assert model(**text).loss > 0
    return messages


def test_models_that_take_no_features_or_others_refuse_them_by_name():
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    ids = torch.ones(1, 8, dtype=torch.long)
    with hf.sequence_parallel(llama):
        with pytest.raises(ValueError, match="LlamaForCausalLM takes no deepstack_visual_embeds: leave it out"):
            llama(input_ids=ids, deepstack_visual_embeds=[torch.ones(1, 32)])
        with pytest.raises(ValueError, match="LlamaForCausalLM got features list, which sequence_parallel does not know"):
            llama(input_ids=ids, features=[torch.ones(1, 32)])
    kind: Any = transformers.Gemma3nTextConfig
    config = kind(
        **SMALL | HEADS | {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 48, "hidden_size_per_layer_input": 4},
        layer_types=["full_attention"] * 2,
        activation_sparsity_pattern=[0.0, 0.0],
    )
    gemma = transformers.Gemma3nForCausalLM(config)
    with (
        hf.sequence_parallel(gemma),
        pytest.raises(ValueError, match="Gemma3nForCausalLM adds more to its layers than inputs_emb"),
    ):
        gemma(inputs_embeds=torch.ones(1, 8, 32), labels=ids)
