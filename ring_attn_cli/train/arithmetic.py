"""Numbers of a training run that both frameworks share: learning rates, FLOPs, initial weights, bins of the held-out loss."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from zlib import crc32

from ring_attn_core.lazy_numpy import np

from .config import Optimizer

if TYPE_CHECKING:
    from ring_attn_core.model.config import TransformerConfig
    from ring_attn_core.model.lora import LoRA

PEAKS = {
    "H200": 989.4,
    "H100 PCIe": 756.5,
    "H100 NVL": 835.5,
    "H100": 989.4,
    "GH200": 989.4,
    "B200": 2250.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10": 125.0,
}
"""Dense bfloat16 TFLOP/s from NVIDIA's data sheets, for devices whose name has all these words; the first match counts."""


def peak(device: str) -> float | None:
    """Return the peak bfloat16 TFLOP/s of the device named ``device``, or None if ``PEAKS`` lacks the device."""
    words = re.split(r"[ -]", device)
    return next((tflops for name, tflops in PEAKS.items() if all(word in words for word in name.split())), None)


def flops_per_token(parameters: int, length: int, config: TransformerConfig, frozen: int = 0) -> float:
    """Return the FLOPs of forward and backward per token: ``6 N - 2 frozen + 7 length x heads x head_dim x layers``.
    A parameter takes 2 FLOPs in the forward and 4 (frozen: 2) in the backward; causal attention 2 x length x heads x head_dim per
    layer, and 2.5 times that in the backward, which recomputes the scores. Activation checkpointing does not count, and of
    recurrent layers only the parameters."""
    from ring_attn_core.model.mixers import recurrent_layers

    layers = config.depth - len(recurrent_layers(config.mixers))
    return 6 * parameters - 2 * frozen + 3.5 * 2 * length * config.heads * config.head_dim * layers


def rates(optimizer: Optimizer, steps: int) -> list[float]:
    """Return each step's learning rate: a warmup to ``learning_rate``, then ``schedule`` down to ``last_rate`` of it.
    Then "constant" stays there. "linear" and "cosine" (half a cosine) fall to the last step. "wsd" stays, and falls linearly over
    the last ``cooldown`` of the steps (warmup-stable-decay, arXiv:2404.06395)."""
    low, first = optimizer.last_rate, optimizer.warmup
    if optimizer.schedule == "wsd":
        first = max(first, steps - round(optimizer.cooldown * steps))

    def rate(step: int) -> float:
        if step < optimizer.warmup:
            return optimizer.learning_rate * (step + 1) / optimizer.warmup
        if step < first or optimizer.schedule == "constant":
            return optimizer.learning_rate
        passed = min((step - first) / max(1, steps - 1 - first), 1.0)
        left = 0.5 * (1 + math.cos(math.pi * passed)) if optimizer.schedule == "cosine" else 1 - passed
        return optimizer.learning_rate * (low + (1 - low) * left)

    return [rate(step) for step in range(steps)]


def first_weights(like: Mapping[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Draw a model's initial weights, seeded by name and ``seed``, the same in both frameworks; ``like`` gives shapes and dtypes.
    Norms and D start at 1, biases and sinks at 0, decays as ``first_decays``, others normal with std 0.02 for the embedding and
    ``in^-0.5`` for matrices [out, in]; of a convolution, ``in`` is its number of taps."""
    from ring_attn_core.model.mixers import first_decays

    def drawn(name: str, x: np.ndarray) -> np.ndarray:
        if name.endswith(("A_log", "dt_bias")):
            return np.asarray(first_decays(len(x))[name.rpartition(".")[2]], x.dtype)
        if x.ndim == 1:
            return np.zeros_like(x) if name.endswith(("bias", "sinks")) else np.ones_like(x)
        deviation = 0.02 if name.startswith("embed") else math.prod(x.shape[1:]) ** -0.5
        return (deviation * _generator(name, seed).standard_normal(x.shape)).astype(x.dtype)

    return {name: drawn(name, x) for name, x in like.items()}


def first_adapters(lora: LoRA, config: TransformerConfig, seed: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Draw the initial float64 matrices (A, B) of each adapter, by projection, seeded by name, the same in both frameworks.
    A [rank, in] is uniform between ``-in^-0.5`` and ``in^-0.5``, as in peft (Kaiming with slope 5^0.5). B [out, rank] is 0."""

    def drawn(name: str, a: tuple[int, int], b: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        return _generator(f"{name}.adapter.a", seed).uniform(-(a[1] ** -0.5), a[1] ** -0.5, a), np.zeros(b)

    return {name: drawn(name, *shapes) for name, shapes in lora.shapes(config).items()}


def _generator(name: str, seed: int) -> np.random.Generator:
    return np.random.default_rng([seed % 2**64, crc32(name.encode())])


def edges(length: int, buckets: int) -> list[int]:
    """Return the exclusive ends of at most ``buckets`` position buckets, ascending: ``length``, its half rounded down, ..."""
    ends = [length]
    while len(ends) < buckets and ends[-1] > 1:
        ends.append(ends[-1] // 2)
    return ends[::-1]
