"""LoRA (arXiv:2106.09685, equation 3): adapters of low rank beside the projections of a model whose own weights are frozen.

    y = x W^T + alpha / rank (x A^T) B^T        W [out, in] frozen, A [rank, in] and B [out, rank] trained

A is drawn, and B is 0 at first, so the first step computes the model's own outputs. Adapters are stored by the name of their
projection, such as ``blocks.0.attention.q``, and exported in the format of the package peft.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..problem.checks import check_number
from ..validation import in_words
from .checks import check_sizes
from .config import TransformerConfig
from .mixers import refuse_mixers
from .weight_names import INSIDE, llama_name
from .weight_saving import replacing

TARGETS = {name: f"attention.{name}" for name in "qkvo"} | {name: f"mlp.{name}" for name in ("gate", "up", "down")}
"""The modules inside a block that may have adapters, by the names of ``LoRA.targets``."""

FILES = ADAPTERS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """The adapters of a model: their rank, their scale ``alpha / rank``, and the projections that have an adapter in every block.

    If ``alpha`` is None, it becomes ``rank``, so that the scale is 1. ``targets``: the projections, as names in ``TARGETS``. They
    are stored without duplicates, in the order of ``TARGETS``. Raise ValueError if ``rank`` is not an int of at least 1,
    ``alpha`` is not a finite number above 0, or ``targets`` is not a list or tuple of such names or is empty.
    """

    rank: int = 8
    alpha: float = None  # type: ignore[assignment]  # filled in below, a float from then on
    targets: tuple[str, ...] = ("q", "k", "v", "o")

    def __post_init__(self) -> None:
        check_sizes(**{"lora.rank": self.rank})
        check_number("lora.alpha", self.rank if self.alpha is None else self.alpha)
        if not isinstance(self.targets, list | tuple):
            raise ValueError(f"lora.targets must be a list of {', '.join(TARGETS)}, got {in_words(self.targets)}")
        alpha = float(self.rank if self.alpha is None else self.alpha)
        if not 0 < alpha < math.inf:
            raise ValueError(f"lora.alpha must be more than 0 and finite, got {alpha}: without it the scale alpha / rank is 1")
        unknown = [name for name in self.targets if name not in TARGETS]
        if unknown or not self.targets:
            got = f"{unknown[0]!r} is not one of them" if unknown else "there is none"
            raise ValueError(f"lora.targets names the projections with adapters, and {got}: choose from {', '.join(TARGETS)}")
        object.__setattr__(self, "alpha", alpha)
        object.__setattr__(self, "targets", tuple(name for name in TARGETS if name in self.targets))

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def check(self, config: TransformerConfig) -> None:
        """Raise ValueError if the rank exceeds the input or output width of a target projection in a model with this config."""
        remedy = "leave q, k, v and o out of lora.targets"
        if {*self.targets} & {*"qkvo"}:
            refuse_mixers("adapters of attention's projections are in every layer", config.mixers, remedy)
        for name in self.targets:
            inputs, outputs = widths(config)[name]
            if self.rank > min(inputs, outputs):
                raise ValueError(
                    f"lora.rank = {self.rank} is above the width of {name}, which maps {inputs} features to {outputs}: make it "
                    f"at most {min(inputs, outputs)}, or leave {name!r} out of lora.targets"
                )

    def shapes(self, config: TransformerConfig) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
        sizes = {TARGETS[name]: widths(config)[name] for name in self.targets}
        inside = {module: ((self.rank, inputs), (outputs, self.rank)) for module, (inputs, outputs) in sizes.items()}
        return {f"blocks.{layer}.{module}": shapes for layer in range(config.depth) for module, shapes in inside.items()}


def widths(config: TransformerConfig) -> dict[str, tuple[int, int]]:
    """Return (input features, output features) of each projection, by its name in ``TARGETS``."""
    dim, hidden, heads, kv_heads = config.dim, config.hidden, *(n * config.head_dim for n in (config.heads, config.kv_heads))
    attention = {"q": (dim, heads), "k": (dim, kv_heads), "v": (dim, kv_heads), "o": (heads, dim)}
    return attention | {"gate": (dim, hidden), "up": (dim, hidden), "down": (hidden, dim)}


def write_adapters(
    folder: str | Path,
    lora: LoRA,
    adapters: Mapping[str, tuple[Any, Any]],
    base: str | None,
    save_file: Callable[[dict[str, Any], Path], None],
) -> None:
    """Write the adapters of a model into a folder that peft loads onto the base model in transformers.
    ``adapters``: (A, B) by projection. ``base``: folder or name of the base model. ``save_file``: that of safetensors for the
    framework."""
    arrays = {}
    for name, (a, b) in adapters.items():
        theirs = "base_model.model." + llama_name(f"{name}.weight").removesuffix(".weight")
        arrays |= {f"{theirs}.lora_A.weight": a, f"{theirs}.lora_B.weight": b}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "target_modules": [INSIDE[TARGETS[name]].rpartition(".")[2] for name in lora.targets],
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    with replacing(folder, FILES) as new:
        (new / SETTINGS).write_text(json.dumps(settings, indent=2))
        save_file(arrays, new / ADAPTERS)
