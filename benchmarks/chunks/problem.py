"""The shapes of the measured MLP, layer and loss."""

from __future__ import annotations

from typing import Any

from ring_attn_core.model.config import TransformerConfig

VOCAB = 128256
"""Vocabulary of Llama 3, for the loss; the layers have a small one."""


def config_of(chunk: int | None) -> TransformerConfig:
    """Return the config of one layer of Llama 3 8B, with its MLP in chunks of ``chunk`` tokens (None: whole)."""
    sizes: dict[str, Any] = {"dim": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336, "depth": 1}
    return TransformerConfig(vocab=256, **sizes, compute_dtype="bfloat16", mlp_chunk=chunk)
