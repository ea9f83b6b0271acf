"""Checks before the first call that a model can run over a ring."""

from __future__ import annotations

import re
from typing import Any

import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ring_attn_core.releases import warn_if_untried

LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
"""The kinds of layers, by transformers' names, whose masks are bands or one interval of keys for each query."""

NOT_SOFTMAX = re.compile(
    "Mamba|SSM|DeltaNet|DeltaAttention|Rwkv|RetNet|Retention|RecurrentBlock|RGLRU|Rglru|LinearAttention|LightningAttention|"
    "ShortConv|xLSTM|mLSTM|Hyena|Indexer|Fourier"
)
"""Classes of modules that mix tokens by other means than softmax attention over all keys."""

OWN_MASKS = {"DogeAttention": "adds to its mask what it computes of every key's value"}
"""Classes of modules that change attention's mask, and the error's words for the change."""
DENSE = {"gemma2", "gemma3_text", "llama", "mistral", "modernbert", "phi3", "qwen2", "qwen3"}
"""Models, by config.model_type, in which each weight has a gradient after every backward."""

OF_ROWS = re.compile("For(Sequence|Image|Video|Audio)Classification|ForMultipleChoice|ForNextSentence|ForQuestionAnswering")
"""Classes of models whose head reads one token of a row, or whose loss is a softmax over a row's tokens."""


def hugging_face_model(model: nn.Module) -> PreTrainedModel:
    """Return the outermost transformers model in ``model``: itself, or the one inside PEFT, DDP, FSDP or torch.compile."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    raise ValueError(
        f"sequence_parallel and enable take a model of transformers, got {type(model).__name__}, which contains none"
    )


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config of the part that reads tokens, which runs over the ring."""
    return config.get_text_config()


def check_config(config: PreTrainedConfig) -> None:
    """Raise ValueError if a config is of a model that cannot run over a ring."""
    _check_stack(config)
    name, text = type(config).__name__, text_config(config)
    kinds = [kind for kind in dict.fromkeys(getattr(text, "layer_types", None) or ()) if kind not in LAYER_TYPES]
    if kinds:
        raise ValueError(
            f"{type(text).__name__} has layers of kind {', '.join(kinds)}, which are not softmax attention over a band of keys: "
            f"a ring knows {', '.join(sorted(LAYER_TYPES))}"
        )
    for asked in ("output_router_logits", "output_attentions"):
        if getattr(text, asked, False) or getattr(config, asked, False):
            why = "whose loss is no sum over tokens" if "router" in asked else "which are never made"
            raise ValueError(f"{name}.{asked}=True asks for router logits or weights of attention, {why}: set it to False")


def _check_stack(config: PreTrainedConfig) -> None:
    """Raise ValueError if the config is of an encoder with a decoder."""
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(config).__name__} is of an encoder with a decoder, whose cross attention "
            'attn_implementation="ring" does not know: models of one stack run over a ring'
        )


def check_model(model: nn.Module) -> None:
    """Raise ValueError, with the names of the modules, if a model cannot run over a ring."""
    warn_if_untried("transformers", not dist.is_initialized() or dist.get_rank() == 0)
    inside = hugging_face_model(model)
    _check_stack(inside.config)
    kinds = {name: type(module).__name__ for name, module in inside.named_modules() if not isinstance(module, PreTrainedModel)}
    found = {name: kind for name, kind in kinds.items() if NOT_SOFTMAX.search(kind) and "Norm" not in kind}
    found = {name: kind for name, kind in found.items() if not any(other.startswith(f"{name}.") for other in found)}
    found |= {name: kind for name, kind in kinds.items() if not found and kind == "Conv1d"}
    if found:
        name, kind = next(iter(found.items()))
        raise ValueError(
            f"{type(inside).__name__} mixes tokens by {', '.join(dict.fromkeys(found.values()))} ({name} for one), which is not "
            f"softmax attention: a ring would compute {kind} within each rank's shard, so it is refused"
        )
    for kind in dict.fromkeys(kinds.values()):
        if kind in OWN_MASKS:
            raise ValueError(
                f"{type(inside).__name__} does not run over a ring: {kind} {OWN_MASKS[kind]}, tokens times tokens, and a ring "
                "knows masks that are bands and intervals of positions alone. Run it unsharded, with another attn_implementation"
            )
    check_config(inside.config)
    if not inside._can_set_attn_implementation():
        raise ValueError(
            f"{type(inside).__name__} computes attention in its own code and asks no attn_implementation: it cannot run "
            "over a ring"
        )
    if any(getattr(c, "is_prompt_learning", False) for c in _adapters(model)):
        raise ValueError(
            "prompt and prefix tuning put tokens in front of the sequence, which every rank would do to its shard: use LoRA"
        )


def check_head(model: nn.Module) -> None:
    """Raise ValueError if a model's head returns one result per row, because a rank has only a shard of the row."""
    inside = hugging_face_model(model)
    if any(OF_ROWS.search(kind.__name__) for kind in type(inside).__mro__):
        raise ValueError(f"the loss of {type(inside).__name__} is no sum over tokens, and its head {answers_once(model)}")


def answers_once(model: nn.Module) -> str:
    """Return the end of an error about a head with one result per row: the reason and the remedy."""
    under = type(hugging_face_model(model).base_model).__name__
    called = "model.get_base_model().base_model" if _adapters(model) else "model.base_model"
    return (
        "answers once a row, from tokens that one rank of a ring holds. Run what is under it: with "
        f"sequence_parallel({called}, gather_logits=True) {under} returns last_hidden_state whole on every rank; apply "
        "the head and the loss to that, divide the loss by the ranks of the ring, and after backward call sum_gradients(model)"
    )


def _adapters(model: nn.Module) -> list[Any]:
    """Return the configs of PEFT's adapters."""
    configs = getattr(model, "peft_config", {})
    return list(configs.values()) if isinstance(configs, dict) else []


def own_positions(model: PreTrainedModel) -> bool:
    """Return True if a call without position_ids counts tokens from 0, as models with rotary embeddings do."""
    return any("Rotary" in type(module).__name__ for module in model.modules())


def uses_all_weights(model: PreTrainedModel) -> bool:
    """Return True if each weight is known to have a gradient after every backward."""
    return model.config.model_type in DENSE
