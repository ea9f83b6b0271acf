"""Configs of published models by name, for ``ring-attn plan --model``."""

from __future__ import annotations

from typing import Any

from .config import TransformerConfig
from .rotary import Llama3, Rotary

LLAMA: dict[str, Any] = {"vocab": 128256, "kv_heads": 8, "eps": 1e-5, "param_dtype": "float32", "compute_dtype": "bfloat16"}
MISTRAL: dict[str, Any] = LLAMA | {"vocab": 32768, "rotary_base": 1e6}
QWEN3: dict[str, Any] = LLAMA | {"vocab": 151936, "head_dim": 128, "rotary_base": 1e6, "qk_norm": True, "eps": 1e-6}

SHAPES: dict[str, dict[str, Any]] = {
    "llama-1b": LLAMA
    | {"dim": 2048, "depth": 16, "heads": 32, "hidden": 8192, "rotary": Rotary(5e5, Llama3(32.0, 1.0, 4.0, 8192))},
    "llama-8b": LLAMA
    | {"dim": 4096, "depth": 32, "heads": 32, "hidden": 14336, "rotary": Rotary(5e5, Llama3(8.0, 1.0, 4.0, 8192)), "tied": False},
    "llama-70b": LLAMA
    | {"dim": 8192, "depth": 80, "heads": 64, "hidden": 28672, "rotary": Rotary(5e5, Llama3(8.0, 1.0, 4.0, 8192)), "tied": False},
    "mistral-7b": MISTRAL | {"dim": 4096, "depth": 32, "heads": 32, "hidden": 14336, "tied": False},
    "qwen3-0.6b": QWEN3 | {"dim": 1024, "depth": 28, "heads": 16, "hidden": 3072},
    "qwen3-8b": QWEN3 | {"dim": 4096, "depth": 36, "heads": 32, "hidden": 12288, "tied": False},
    "qwen3-32b": QWEN3 | {"dim": 5120, "depth": 64, "heads": 64, "hidden": 25600, "tied": False},
}
"""Llama 3.1 and 3.2, Mistral 7B v0.3 and Qwen3, as TransformerConfig's arguments: float32 weights, bfloat16 arithmetic."""


def shape(name: str) -> TransformerConfig:
    if name not in SHAPES:
        raise ValueError(f"no model is called {name!r}: choose one of {', '.join(SHAPES)}, or name a config.json")
    return TransformerConfig(**SHAPES[name])
