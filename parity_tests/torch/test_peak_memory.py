"""The formula for peak memory against what PyTorch holds: weights, moments, and what autograd saves of a block, to the byte."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from ring_attn_core.model.memory import Training, block_kept, block_saved, peak_memory, total, weights
from ring_attn_torch import RingTransformer

SIZES: dict[str, Any] = {"vocab": 301, "dim": 56, "depth": 2, "heads": 4, "kv_heads": 2, "head_dim": 10, "hidden": 72}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "in bfloat16": {"compute_dtype": "bfloat16"},
    "of Qwen3": {"compute_dtype": "bfloat16", "qk_norm": True, "tied": False},
    "of Qwen2": {"compute_dtype": "bfloat16", "qkv_bias": True},
    "without positions": {"rotary_base": None, "sinks": True},
}
TOKENS = 46


def made(activations: str = "keep", **features: Any) -> RingTransformer:
    return RingTransformer(**SIZES, **features, layout="contiguous", activations=activations)


@pytest.mark.parametrize("name", FEATURES)
def test_weights_gradients_and_moments_are_counted_to_the_byte(name):
    model = made(**FEATURES[name])
    assert weights(model.config) == sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros((1, TOKENS), dtype=torch.long)).sum().backward()
    optimizer.step()
    moments = sum(x.nbytes for state in optimizer.state.values() for key, x in state.items() if key != "step")
    terms = {term.what: term.size for term in peak_memory(model.config, Training(gpus=1, tokens=TOKENS)).stays}
    assert terms["weights"] == sum(p.nbytes for p in model.parameters())
    assert terms["gradients"] == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    assert terms["moments"] == moments


def saved_bytes(model: RingTransformer) -> Counter[str]:
    """Count the bytes that autograd saves in the first block, each array once and no weight, by the terms of the formula."""
    config, arrays = model.config, {}
    weights_at = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(x: torch.Tensor) -> torch.Tensor:
        arrays[x.untyped_storage().data_ptr()] = x
        return x

    compute = getattr(torch, config.compute_dtype or config.param_dtype)
    x = torch.randn(1, TOKENS, config.dim, dtype=compute, requires_grad=True)
    with saved_tensors_hooks(pack, lambda x: x):
        model.blocks[0](x, torch.arange(TOKENS))
    found: Counter[str] = Counter()
    shared = (TOKENS, 1, config.head_dim)
    for place, array in arrays.items():
        if TOKENS in array.shape and place not in weights_at:
            name = {config.hidden: "MLP", config.dim: "stream", config.heads: "lse"}
            last = array.shape[-1]
            flat = last == config.heads * config.head_dim
            what = "angles" if array.shape == shared else "heads" if flat or last == config.head_dim else name.get(last, "norm")
            norm = what in ("stream", "heads") and array.dtype != compute
            found["norm" if norm else what] += array.untyped_storage().nbytes()
    return found


@pytest.mark.parametrize("name", [name for name in FEATURES if "bfloat16" in str(FEATURES[name])])
def test_the_arrays_that_autograd_saves_of_a_block_are_counted_to_the_byte(name):
    """In bfloat16, where the norms' own arrays are told by their float32: on a CPU they save these in place of their input."""
    model = made(**FEATURES[name])
    formula = {term.what: term.size for term in (*block_kept(model.config, TOKENS), *block_saved(model.config, TOKENS))}
    found = saved_bytes(model)
    assert found["MLP"] == formula["MLP"]
    assert found["lse"] == formula["lse"]
    assert found["angles"] == formula["angles"]
    assert found["heads"] == formula["q, k, v"] + formula["out"]
    assert found["stream"] == formula["attention's input"] + formula["MLP's input"]
    normed = sum(formula[what] for what in ("input", "sum", "heads to norm"))
    reciprocals = 4 * TOKENS * (2 + 6 * model.config.qk_norm)
    assert found["norm"] == 2 * 2 * normed + reciprocals


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("activations", ["recompute", "offload"])
def test_the_arrays_that_a_block_keeps_are_counted_to_the_byte(activations, dtype, monkeypatch):
    from ring_attn_torch.layers import offload, recompute

    model, kept = made(activations, compute_dtype=dtype), []
    contexts, put = recompute.contexts, offload.OffloadedTensors.put
    noted = lambda store: lambda x: (kept.append(x.nbytes), store(x))[1]
    if activations == "recompute":
        monkeypatch.setattr(recompute, "contexts", lambda store: contexts(noted(store)))
    else:
        monkeypatch.setattr(offload.OffloadedTensors, "put", lambda host, x: noted(lambda x: put(host, x))(x))
    model(torch.zeros((1, TOKENS), dtype=torch.long))
    block = block_kept(model.config, TOKENS)
    expected = total(block) if activations == "offload" else total(block[1:])  # torch's checkpoint keeps the input itself
    assert sum(kept) == model.config.depth * expected
    if activations == "offload":
        memory = peak_memory(model.config, Training(gpus=1, tokens=TOKENS, activations=activations))
        assert sum(kept) == total(memory.host)
