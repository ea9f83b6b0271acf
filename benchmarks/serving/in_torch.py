"""Generation in PyTorch: one process per rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ring_attn_torch import RingTransformer

from .problem import Problem, config_of, prompt_of
from .watch import Watch


def made(problem: Problem, device: torch.device) -> RingTransformer:
    """Build the model with random weights, the same on each rank."""
    with torch.device("meta"):
        model = RingTransformer.from_config(config_of(problem))
    model.to_empty(device=device)
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.ones_(p) if p.ndim == 1 else nn.init.normal_(p, std=0.02)
    return model


def run(problem: Problem, device: torch.device) -> dict[str, Any]:
    model = made(problem, device)
    warm = min(problem.tokens, 2 * problem.chunk)
    model.generate([prompt_of(problem, warm)], 4, chunk=problem.chunk)  # compile and load the kernels of the call below
    prompt = prompt_of(problem, problem.tokens)
    watch = Watch()
    tokens = model.generate([prompt], problem.new, chunk=problem.chunk, on_token=watch.on_token, progress=watch.progress)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return watch.found() | {"tokens": tokens[0], "peak": peak}
