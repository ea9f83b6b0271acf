"""The trained models, from transformers with random weights, and their operations per token."""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import AutoModelForCausalLM, GptOssConfig, PretrainedConfig, PreTrainedModel, Qwen3Config

CLIP, LEARNING_RATE, LOSS_CHUNK = 1.0, 1e-5, 4096


class Problem(NamedTuple):
    """One row of the benchmark.

    ``model``: a name of MODELS. ``attention``: "ring", "accelerate" or one of transformers' own. ``tokens``: per GPU. ``steps``:
    timed steps after the warm-up step.
    """

    model: str
    attention: str
    layers: int
    tokens: int
    steps: int
    offload: bool
    tiny: bool = False


def qwen3_8b(layers: int, length: int, tiny: bool) -> Qwen3Config:
    """Return the config of Qwen3-8B with ``layers`` layers."""
    sizes: dict[str, Any] = {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288}
    heads: dict[str, Any] = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    if tiny:
        sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return Qwen3Config(**sizes, **heads, num_hidden_layers=layers, max_position_embeddings=length, tie_word_embeddings=False)


def gpt_oss_20b(layers: int, length: int, tiny: bool) -> GptOssConfig:
    """Return the config of gpt-oss-20b with ``layers`` layers: sinks, a window of 128 in every other layer, 4 of 32 experts."""
    sizes: dict[str, Any] = {"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32}
    heads: dict[str, Any] = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128}
    if tiny:
        sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8}
    rotary = {"rope_type": "default", "rope_theta": 150000.0}
    return GptOssConfig(
        **sizes, **heads, num_hidden_layers=layers, max_position_embeddings=length, rope_parameters=rotary, num_experts_per_tok=4
    )


MODELS = {"qwen3-8b": qwen3_8b, "gpt-oss-20b": gpt_oss_20b}


def made(problem: Problem, length: int) -> PreTrainedModel:
    """Build the model on torch's default device, with recomputed layers. ``length``: tokens of the global sequence."""
    config = MODELS[problem.model](problem.layers, length, problem.tiny)
    attention = "sdpa" if problem.attention == "accelerate" else problem.attention
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    options: dict[str, Any] = {"offload": True} if problem.offload else {}
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # offload: transformers 5.23
    enable(**options)
    return model


def flops_per_token(config: PretrainedConfig, length: int) -> float:
    """Return the operations of forward and backward per token, without recomputation.

    Each weight that multiplies the token counts 6; attention counts 3.5 times its forward, 4 x heads x head_dim for each visible
    pair. In a mixture of experts, only a token's own experts count. Without windows and for many tokens this is ``6 N + 3.5 x 2 x
    length x heads x head_dim x layers``, with N without the embedding.
    """
    dim, wide = config.hidden_size, config.head_dim * config.num_attention_heads
    narrow = config.head_dim * config.num_key_value_heads
    experts = getattr(config, "num_experts_per_tok", 1)
    layer = 2 * dim * (wide + narrow) + 3 * dim * config.intermediate_size * experts
    numbers = config.num_hidden_layers * layer + dim * config.vocab_size
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    seen = {"full_attention": (length + 1) / 2, "sliding_attention": getattr(config, "sliding_window", None) or length}
    return 6 * numbers + 3.5 * 4 * wide * sum(seen[kind] for kind in kinds)
