"""Shapes of real models for benchmarks."""

from __future__ import annotations

from typing import Any

from ring_attn_core.model.config import TransformerConfig
from ring_attn_core.model.rotary import Rotary


def llama_3_8b(layers: int, tiny: bool = False, param_dtype: str = "float32", mlp_chunk: int | None = None) -> TransformerConfig:
    """Return the config of Llama 3 8B with ``layers`` layers, computed in bfloat16.

    ``tiny``: narrow and in float32, for a trial run on a CPU.
    """
    sizes: dict[str, Any] = {"vocab": 128256, "dim": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336}
    if tiny:
        sizes = {"vocab": 256, "dim": 64, "heads": 4, "kv_heads": 2, "hidden": 128}
    return TransformerConfig(
        **sizes,
        depth=layers,
        tied=False,
        eps=1e-5,
        rotary=Rotary(500000.0),
        compute_dtype=None if tiny else "bfloat16",
        param_dtype=param_dtype,
        mlp_chunk=mlp_chunk,
    )
