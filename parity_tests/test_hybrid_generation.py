"""Hybrid models generate: the logits of each new token are those of the model on all tokens so far, on any ring."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

import ring_attn_torch
from ring_attn_core.model.config import TransformerConfig

from .support import hybrid_steps
from .support.hybrid_steps import CALLS, CHUNK, IDS, NEW, Calls
from .support.recurrences import relative
from .support.recurrent_layers import like
from .support.selection import first
from .test_recurrent_layers import HYBRID

SIZES = HYBRID
Mixers = tuple[str, ...]
MIXERS: dict[str, Mixers] = {
    "both": ("gated_delta_net", "attention", "mamba2"),
    "gated_delta_net": ("attention", "gated_delta_net", "gated_delta_net"),
    "mamba2": ("mamba2", "mamba2", "attention"),
}
RINGS = [(2, "zigzag"), (4, "zigzag"), (3, "contiguous"), (1, "zigzag")]
IN_JAX = [(2, "zigzag", "both"), (4, "zigzag", "gated_delta_net"), (3, "contiguous", "mamba2"), (1, "zigzag", "both")]
PROMPTS = [IDS[0, :9].tolist(), IDS[1, :4].tolist()]


def weighted(package: Any, model: Any) -> Any:
    """Give a model weights whose states decay slowly."""
    dtype = model.config.param_dtype
    return package.from_numpy(model, like({name: x.shape for name, x in sorted(package.to_numpy(model).items())}, dtype))


def in_torch(mixers: Mixers, group: Any = None, layout: str = "contiguous", dtype: str = "float64", **options: Any) -> Any:
    sizes = SIZES | {"depth": len(mixers), "mixers": mixers, "param_dtype": dtype} | options
    return weighted(ring_attn_torch, ring_attn_torch.RingTransformer(**sizes, group=group, layout=layout))


@cache
def expected(mixers: Mixers) -> np.ndarray:
    with torch.no_grad():
        return in_torch(mixers)(torch.from_numpy(IDS)).numpy()


@cache
def text(mixers: Mixers) -> list[list[int]]:
    """The most probable 6 tokens after each prompt, by the model on all tokens so far."""
    model, rows = in_torch(mixers), [list(row) for row in PROMPTS]
    with torch.no_grad():
        for _ in range(6):
            for row in rows:
                row.append(int(model(torch.tensor([row]))[0, -1].argmax()))
    return [row[len(prompt) :] for row, prompt in zip(rows, PROMPTS, strict=True)]


def appended(model: Any, cache: Any, expected: np.ndarray, calls: Calls = CALLS) -> list[float]:
    prompts = lambda ids, lengths: ring_attn_torch.prefill_prompts(model, torch.from_numpy(ids), cache, list(lengths))
    tokens = lambda ids, valid: ring_attn_torch.decode_step(model, torch.from_numpy(ids), cache, valid=torch.from_numpy(valid))
    logits = lambda step: lambda *arguments: step(*arguments)[0].double().numpy()
    return hybrid_steps.errors(logits(prompts), logits(tokens), expected, calls)


def errors_in_torch(group: Any, layout: str, mixers: Mixers, expected: np.ndarray, calls: Calls) -> list[float]:
    model = in_torch(mixers, group, layout)
    return appended(model, ring_attn_torch.KVCache.make(model.config, 2, 96, group=group), expected, calls)


def on_torch(group: Any, layout: str, mixers: Mixers, expected: np.ndarray) -> tuple[list[float], list[list[int]]]:
    model = in_torch(mixers, group, layout)
    cache = ring_attn_torch.KVCache.make(model.config, 2, 96, group=group)
    found = appended(model, cache, expected)
    cache.fork(0, 1)
    assert all(torch.equal(x[0], x[1]) and x.any() for pair in cache.states for x in pair)
    cache.reset([1])
    assert not any(x[1].any() for pair in cache.states for x in pair)
    return found, model.generate(PROMPTS, 6, chunk=7)


@pytest.mark.parametrize("mixers", MIXERS.values(), ids=MIXERS)
@pytest.mark.parametrize(("ranks", "layout"), RINGS)
def test_new_tokens_of_pytorch_are_those_of_the_whole_model(gloo, ranks, layout, mixers):
    for found, generated in gloo(ranks, on_torch, layout, mixers, expected(mixers)):
        assert max(found) < 1e-12
        assert generated == text(mixers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_are_kept_in_float32(dtype):
    """The bound is the model's own error in this dtype."""
    model, exact = in_torch(MIXERS["both"], dtype="float32", compute_dtype=dtype), expected(MIXERS["both"])
    cache = ring_attn_torch.KVCache.make(model.config, 2, 96)
    assert {x.dtype for pair in cache.states for x in pair} == {torch.float32}
    with torch.no_grad():
        own = model(torch.from_numpy(IDS)).double().numpy()
    assert max(appended(model, cache, exact)) < max(map(relative, own.reshape(-1, 31), exact.reshape(-1, 31)))


def on_jax(ranks: int, layout: str, mixers: Mixers, expected: np.ndarray, calls: Calls = CALLS) -> tuple[Any, Any, list[float]]:
    """Return a model, its cache after the calls, and the errors of their logits."""
    import jax
    from flax import nnx

    import ring_attn_jax

    from .jax.ring import mesh_of

    padded = lambda x, tokens: jax.numpy.pad(x, ((0, 0), (0, tokens - x.shape[1])))  # one program for all chunks
    mesh, sizes = mesh_of(ranks), SIZES | {"depth": len(mixers), "mixers": mixers, "param_dtype": "float64"}
    model = weighted(ring_attn_jax, ring_attn_jax.RingTransformer(**sizes, layout=layout, mesh=mesh, rngs=nnx.Rngs(0)))
    cache = ring_attn_jax.KVCache.make(model.config, 2, 96, mesh=mesh)

    def prompts(ids: Any, lengths: Any) -> Any:
        nonlocal cache
        logits, cache = ring_attn_jax.prefill_prompts(model, padded(ids, CHUNK), cache, jax.numpy.asarray(lengths))
        return np.asarray(logits)

    def tokens(ids: Any, valid: Any) -> Any:
        nonlocal cache
        logits, cache = ring_attn_jax.decode_step(model, padded(ids, NEW), cache, valid=padded(valid, NEW))
        return np.asarray(logits)

    found = hybrid_steps.errors(prompts, tokens, expected, calls)
    return model, cache, found


@pytest.mark.parametrize(("ranks", "layout", "mixers"), first(IN_JAX))
def test_new_tokens_of_jax_are_those_of_the_whole_model(ranks, layout, mixers):
    jax = pytest.importorskip("jax")
    mixers = MIXERS[mixers]
    with jax.enable_x64(True):
        model, cache, found = on_jax(ranks, layout, mixers, expected(mixers))
        assert max(found) < 1e-12
        forked = cache.fork(0, 1)
        assert all((x[0] == x[1]).all() and x.any() for pair in forked.states for x in pair)
        assert not any(x[1].any() for pair in forked.reset([1]).states for x in pair)
        assert model.generate(PROMPTS, 6) == text(mixers)


def test_a_cache_with_states_does_not_go_back():
    cache = ring_attn_torch.KVCache.make(TransformerConfig(**HYBRID), 1, 8)
    with pytest.raises(ValueError, match="holds the states of 3 recurrent layers, which cannot go back"):
        cache.rollback(0)


def test_a_model_without_attention_has_no_cache():
    recurrent: dict[str, Any] = HYBRID | {"mixers": ["mamba2"] * 4}
    with pytest.raises(ValueError, match="all layers of this model are recurrent"):
        ring_attn_torch.KVCache.make(TransformerConfig(**recurrent), 1, 8)


def test_a_striped_hybrid_is_refused_before_its_first_layer(gloo):
    gloo(2, refused_striped)


def refused_striped(group: Any) -> None:
    model = in_torch(MIXERS["gated_delta_net"], group, "striped")
    cache = ring_attn_torch.KVCache.make(model.config, 2, 8, group=group)
    with pytest.raises(ValueError, match="the layout striped gives each token's predecessor to another"):
        ring_attn_torch.prefill_prompts(model, torch.from_numpy(IDS[:, :4]), cache)
    assert not any(layer.any() for layer in cache.k)
