"""The served model and prompt, and their operations and bytes."""

from __future__ import annotations

import random
from typing import NamedTuple

from ring_attn_core.model.config import TransformerConfig
from ring_attn_core.model.memory import block_weights

from ..support.shapes import llama_3_8b


class Problem(NamedTuple):
    """One prompt: ``tokens`` in all over all GPUs, prefilled ``chunk`` tokens at a time, and ``new`` tokens generated."""

    layers: int
    tokens: int
    chunk: int
    new: int
    tiny: bool = False


def config_of(problem: Problem) -> TransformerConfig:
    """Return the config of Llama 3 8B with bfloat16 weights."""
    return llama_3_8b(problem.layers, problem.tiny, param_dtype="float32" if problem.tiny else "bfloat16")


def prompt_of(problem: Problem, tokens: int) -> list[int]:
    """Draw random ids, seeded by their number."""
    return random.Random(tokens).choices(range(config_of(problem).vocab), k=tokens)


def prefill_flops(problem: Problem) -> tuple[float, float]:
    """Return the prompt's FLOPs in attention, over visible pairs, and in products with weights.

    The head counts for one token only.
    """
    config = config_of(problem)
    pairs = problem.tokens * (problem.tokens + 1) / 2
    attention = 4 * pairs * config.heads * config.head_dim * config.depth
    return attention, 2 * problem.tokens * block_weights(config) * config.depth + 2 * config.vocab * config.dim


def step_bytes(problem: Problem, gpus: int) -> tuple[int, int]:
    """Return the bytes that a GPU reads for one new token: its shard of the cache (keys, values, positions), and the weights."""
    config = config_of(problem)
    itemsize = 4 if problem.tiny else 2
    cache = problem.tokens // gpus * config.depth * (2 * config.kv_heads * config.head_dim * itemsize + 4)
    return cache, itemsize * (config.depth * block_weights(config) + config.vocab * config.dim)
