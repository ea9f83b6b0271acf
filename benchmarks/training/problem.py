"""What is trained."""

from __future__ import annotations

from typing import NamedTuple

from ring_attn_core.model.config import TransformerConfig

from ..support.shapes import llama_3_8b

CLIP, LEARNING_RATE = 1.0, 1e-5


class Problem(NamedTuple):
    """``tokens`` of a GPU, ``steps`` after the one that warms up; chunks in tokens, None for all at once."""

    layers: int
    tokens: int
    activations: str
    mlp_chunk: int | None
    loss_chunk: int
    steps: int
    tiny: bool = False


def config_of(problem: Problem) -> TransformerConfig:
    """Llama 3 8B's shape, with as many layers as the problem says."""
    return llama_3_8b(problem.layers, problem.tiny, mlp_chunk=problem.mlp_chunk)
