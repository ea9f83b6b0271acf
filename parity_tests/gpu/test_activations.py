"""Blocks that keep little, on a GPU: the same bits, and the memory that the formula says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ring_attn_core.model.memory import Training, block_kept, peak_memory, total
from ring_attn_torch import RingTransformer, loss

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SIZES: dict[str, Any] = {"vocab": 1024, "dim": 512, "heads": 8, "kv_heads": 2, "head_dim": 64, "hidden": 1024}
TOKENS = 16_384


def step(activations: str, depth: int) -> tuple[list[torch.Tensor], int]:
    """The gradients of a step, and the most bytes of the GPU above what was there before it."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        arguments: dict[str, Any] = {"layout": "contiguous", "compute_dtype": "bfloat16", "activations": activations}
        model = RingTransformer(**SIZES, depth=depth, **arguments)
        ids = torch.randint(SIZES["vocab"], (1, TOKENS))
    loss(model(ids), ids).backward()  # compiles, and makes the gradients
    model.zero_grad(set_to_none=False)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss(model(ids), ids).backward()
    torch.cuda.synchronize()
    return [p.grad for p in model.parameters() if p.grad is not None], torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("activations", ["recompute", "offload"])
def test_gradients_are_the_same_to_the_bit(activations):
    for a, b in zip(step(activations, 4)[0], step("keep", 4)[0], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
def test_memory_grows_with_the_layers_as_the_formula_says(activations):
    peaks, formula = [], []
    for depth in (4, 12):
        peaks.append(step(activations, depth)[1])
        model = RingTransformer(**SIZES, depth=depth, compute_dtype="bfloat16", activations=activations)
        training = Training(gpus=1, tokens=TOKENS, activations=activations, mlp_chunk=None, loss_chunk=None)
        memory = peak_memory(model.config, training)
        formula.append(total(memory.stays[6:]) + total(memory.moments[memory.worst]))
    block = total(block_kept(model.config, TOKENS))
    assert abs((peaks[1] - peaks[0]) - (formula[1] - formula[0])) <= 0.15 * (formula[1] - formula[0]) + 0.5 * block
