"""The trained model."""

from __future__ import annotations

from typing import NamedTuple

from ring_attn_core.model.config import TransformerConfig

from ..support.shapes import llama_3_8b

CLIP, LEARNING_RATE = 1.0, 1e-5


class Problem(NamedTuple):
    """The settings of the training.

    ``tokens``: per GPU. ``steps``: timed steps after the warm-up step. ``mlp_chunk``, ``loss_chunk``: tokens, None for all.
    """

    layers: int
    tokens: int
    activations: str
    mlp_chunk: int | None
    loss_chunk: int
    steps: int
    tiny: bool = False


def config_of(problem: Problem) -> TransformerConfig:
    """Return the config of Llama 3 8B with the problem's number of layers."""
    return llama_3_8b(problem.layers, problem.tiny, mlp_chunk=problem.mlp_chunk)
