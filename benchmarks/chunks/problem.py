"""What is computed."""

from __future__ import annotations

from typing import Any

from ring_attn_core.model.config import TransformerConfig

VOCAB = 128256
"""Llama 3's, for the loss; the layers are given a small one."""


def config_of(chunk: int | None) -> TransformerConfig:
    """One layer of Llama 3 8B, its MLP in chunks of so many tokens."""
    sizes: dict[str, Any] = {"dim": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336, "depth": 1}
    return TransformerConfig(vocab=256, **sizes, compute_dtype="bfloat16", mlp_chunk=chunk)
