"""What is trained."""

from __future__ import annotations

from typing import NamedTuple

from ring_attn_core.model.config import TransformerConfig
from ring_attn_core.model.rotary import Rotary

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
    sizes = {"vocab": 128256, "dim": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336, "compute_dtype": "bfloat16"}
    if problem.tiny:
        sizes = {"vocab": 256, "dim": 64, "heads": 4, "kv_heads": 2, "hidden": 128, "compute_dtype": None}
    rotary = Rotary(500000.0)
    return TransformerConfig(**sizes, depth=problem.layers, tied=False, eps=1e-5, rotary=rotary, mlp_chunk=problem.mlp_chunk)
