"""Tiny random models of transformers, what eager attention makes of them on one process, and what a ring does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import ring_attn_torch.transformers as hf
from ring_attn_core.reference.tolerance import UNIT_ROUNDOFF, relative_error
from ring_attn_torch import gather, sum_gradients

from .permuted import permuted_by

VOCAB, LENGTH = 48, 26
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SMALL |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
HEADS = {"head_dim": 8}
ALTERNATE = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 5, **HEADS}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", HEADS),
    "qwen2_5_vl": (
        "Qwen2_5_VLTextConfig",
        "Qwen2_5_VLTextModel",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}},
    ),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**HEADS, **ALTERNATE, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 5},
    ),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**HEADS, **ALTERNATE, "query_pre_attn_scalar": 5}),
    "gpt_oss": (  # each expert gets every token: products of another number of rows round in another way
        "GptOssConfig",
        "GptOssForCausalLM",
        {**HEADS, **ALTERNATE, "num_local_experts": 2, "num_experts_per_tok": 2},
    ),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {**HEADS, "attention_chunk_size": 7, "num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 40}
        | {"no_rope_layers": [1, 0], "attn_temperature_tuning": True, "floor_scale": 3, "attn_scale": 0.4},
    ),
    "modernbert": ("ModernBertConfig", "ModernBertForMaskedLM", {"local_attention": 6, "global_attn_every_n_layers": 2}),
    "dynamic": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}, "max_position_embeddings": 16},
    ),
    "longrope": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {
            "max_position_embeddings": 40,
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3],
                "long_factor": [2.0, 2.2, 3.0, 4.0],
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "gemma3_images": ("Gemma3Config", "Gemma3ForConditionalGeneration", {}),
}
KINDS = dict.fromkeys(CLASSES, ("plain", "padded", "holes", "packed"))
KINDS |= dict.fromkeys(("mistral", "gpt_oss"), ("plain", "padded", "holes", "packed", "skipped", "masked"))
KINDS |= {"dynamic": ("plain",), "longrope": ("plain",), "gemma3_images": ("plain", "padded")}
TINY_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TINY_VISION |= {"image_size": 28, "patch_size": 14}


class Case(NamedTuple):
    """A batch for a model: ``kind`` plain, padded (right and left and a hole), packed, or blocks (images).

    Positions skip forward: "skipped" as a new document begins, none at 0; "masked" inside a document, under a mask of ones.
    """

    model: str
    kind: str = "plain"
    layout: str = "zigzag"
    dtype: str = "float64"


def make(name: str, dtype: str = "float64", implementation: str = "eager") -> Any:
    """The model with weights that are the same in every process, large enough for attention to be far from uniform."""
    config_class, model_class, own = CLASSES[name]
    settings = {**SMALL, **own}
    if name == "gemma3_images":
        text = {**SMALL, **CLASSES["gemma3"][2]}
        settings = {"text_config": text, "vision_config": TINY_VISION, "mm_tokens_per_image": 4}
    config = getattr(transformers, config_class)(**settings, attn_implementation=implementation, experts_implementation="eager")
    model = getattr(transformers, model_class)(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for label, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(noise * 0.25 if p.ndim > 1 or "bias" in label or "sinks" in label else 1 + 0.2 * noise)
    return model.to(getattr(torch, dtype)).train()


def batch(case: Case) -> dict[str, Tensor]:
    """Return the arguments that every rank passes to the model."""
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(3, VOCAB, (2, LENGTH), generator=generator)
    labels = ids.clone()
    labels[:, 4:7] = -100
    given = {"input_ids": ids, "labels": labels}
    if case.kind == "padded":
        mask = torch.ones_like(ids)
        mask[0, 21:] = 0
        mask[1, :3] = 0
        given["attention_mask"] = mask
        labels[mask == 0] = -100
        labels[1, 3] = -100
    if case.kind == "holes":
        mask = torch.ones_like(ids)
        mask[0, 9:11] = 0
        given["attention_mask"] = mask
        labels[mask == 0] = -100
        labels[0, 11] = -100
    if case.kind in PACKED:
        first = (5, 17, 2) if case.kind == "skipped" else (0, 0, 0)
        pieces = [torch.arange(n) + at for n, at in zip(DOCUMENTS, first, strict=True)]
        given["position_ids"] = torch.cat(pieces)[None].expand(2, -1).contiguous()
        labels[:, STARTS] = -100
    if case.kind == "masked":
        given["attention_mask"] = torch.ones_like(ids)
        given["position_ids"] = (torch.arange(LENGTH) + 3)[None] + torch.tensor([[0], [4]]) * (torch.arange(LENGTH) > 9)
    if case.model == "gemma3_images":
        given["token_type_ids"] = torch.zeros_like(ids)
        given["token_type_ids"][:, 3:9] = given["token_type_ids"][1, 14:23] = 1
    if case.model == "modernbert":
        given["labels"][:, ::2] = -100
    if "Text" in CLASSES[case.model][1]:
        given.pop("labels")
        if case.kind == "packed":
            given["position_ids"] = given["position_ids"][None].expand(4, -1, -1)
        elif case.kind == "plain":
            given["position_ids"] = torch.randint(0, 40, (3, 2, LENGTH), generator=generator)
    return given


PACKED = ("packed", "skipped")
DOCUMENTS = (9, 3, 14)
STARTS = [sum(DOCUMENTS[:i]) for i in range(len(DOCUMENTS))]


@contextmanager
def in_float64() -> Iterator[None]:
    """Inside this ``with`` what transformers' models compute in float32 whatever their dtype, they compute in float64."""

    class Wide:
        float32 = torch.float64

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("transformers.models.") and vars(module).get("torch") is torch:
                stack.enter_context(patch.object(module, "torch", Wide()))
        stack.enter_context(patch.object(Tensor, "float", Tensor.double))
        yield


def computing(dtype: str) -> Any:
    return in_float64() if dtype == "float64" else ExitStack()


Outcome = dict[str, np.ndarray]
"""logits, loss and every gradient by the name of its parameter."""


@lru_cache(maxsize=512)
def truth(case: Case, order: int = 0) -> Outcome:
    """Return the outcome of eager attention on one process, of each packed document by itself.

    ``order``: 0 for the order in which sums are made there. Others permute the keys of every layer, and the rows of the batch.
    """
    flipped = lambda name, x: x.flip(-2 if name == "position_ids" else 0) if order else x
    model = make(case.model, case.dtype, "permuted" if order else "eager")
    given = {name: flipped(name, x) for name, x in batch(case).items()}
    given.pop("labels", None)
    with computing(case.dtype), permuted_by(order):
        if case.kind in PACKED:
            parts = []
            for start, tokens in zip(STARTS, DOCUMENTS, strict=True):
                own = {name: x[..., start : start + tokens] for name, x in given.items()}
                parts.append(result_of(model(**own, **without_cache(model))))
            result = torch.cat(parts, 1)
        else:
            result = result_of(model(**given, **without_cache(model)))
        result = flipped("", result)
        total = objective(result, batch(case).get("labels"), case)
        total.backward()
    return outcome(model, result, total, case)


ORDERS = (1, 2, 3, 4)


@lru_cache(maxsize=64)
def rounding_of(model: str, dtype: str = "float64") -> float:
    """The bound of a model's relative errors: twice the worst by which eager attention differs from itself in other ORDERS."""
    cases = [Case(model, kind, dtype=dtype) for kind in KINDS[model]]
    pairs = [(truth(case, order)[name], x) for case in cases for name, x in truth(case).items() for order in ORDERS]
    return 2 * max(relative_error(other, x) for other, x in pairs) + 2 * UNIT_ROUNDOFF[dtype]


def without_cache(model: Any) -> dict[str, Any]:
    return {} if "Bert" in type(model).__name__ else {"use_cache": False}


def result_of(output: Any) -> Tensor:
    return output.logits if "logits" in output else output.last_hidden_state


def objective(result: Tensor, labels: Tensor | None, case: Case) -> Tensor:
    """The loss, or of a model without labels a random linear function of what it returns."""
    if labels is None:
        return (result * cotangent(result) * present(case)[..., None]).sum()
    if case.model != "modernbert":
        labels = F.pad(labels[:, 1:], (0, 1), value=-100)
    return F.cross_entropy(result.flatten(0, 1), labels.flatten(), ignore_index=-100)


def cotangent(result: Tensor) -> Tensor:
    return torch.randn(2, LENGTH, result.shape[-1], generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(
        result.dtype
    )


def present(case: Case) -> Tensor:
    given = batch(case)
    return given.get("attention_mask", torch.ones_like(given["input_ids"]))


def outcome(model: nn.Module, result: Tensor, loss: Tensor, case: Case) -> Outcome:
    """Return the results without those at padding, which should not be read."""
    logits = result.detach()[present(case).bool()]
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.numpy(), "loss": loss.detach().numpy(), **gradients}


def over_a_ring(group: Any, cases: list[Case]) -> list[Outcome]:
    """The same of the ring, with gradients summed over the ranks; what a process of the pool runs."""
    torch.set_grad_enabled(True)
    return [_one(group, case) for case in cases]


def _one(group: Any, case: Case) -> Outcome:
    model, given = make(case.model, case.dtype, "ring"), batch(case)
    balanced = case.layout == "balanced"  # which only a call knows
    with computing(case.dtype), hf.sequence_parallel(model, group, case.layout, gather_logits=balanced):
        output = model(**given)
        result = result_of(output) if balanced else gather(result_of(output), group=group, layout=case.layout, length=LENGTH)
        if "labels" in given:
            output.loss.backward()
            loss = output.loss
        else:
            loss = objective(result, None, case)
            (loss / (group.size())).backward()
    sum_gradients(model, group)
    return outcome(model, result, loss, case)


def ready(group: Any) -> None:
    """Import everything that a process of the pool needs."""
    for name in CLASSES:
        make(name)
