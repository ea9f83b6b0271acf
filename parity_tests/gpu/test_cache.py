"""KVCache and prefill on a GPU: a step in a CUDA graph, and chunks of a prompt against the whole of it in kernels."""

# pyright: reportCallIssue=false

from __future__ import annotations

import numpy as np
import pytest
import torch

from ring_attn_core import causal, sliding_window
from ring_attn_core.reference.oracle import exact, plain
from ring_attn_core.reference.tolerance import bound, relative_error
from ring_attn_torch import CacheSizes, KVCache, prefill, ring_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SIZES = CacheSizes(2, 2, 64)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("window", [None, 5])
def test_a_step_in_a_cuda_graph_is_the_step(window, dtype):
    """Three requests that get 0 to 2 tokens each time; a graph of two tokens with some of them no tokens."""
    options = {"capacity": None if window else 60, "dtype": dtype, "window": window, "device": "cuda"}
    eager, captured = (KVCache.make(SIZES, 3, **options) for _ in range(2))
    new = torch.randn(2, 3, 2, 2, 64, device="cuda", dtype=torch.bfloat16)
    valid = torch.ones(3, 2, device="cuda", dtype=torch.bool)

    def step(cache):
        step = cache.step(2, valid=valid)
        for layer in range(2):
            cache.append(layer, new[layer], -new[layer], step)
        cache.advance(step)

    step(captured)
    step(eager)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(captured)
    rng = np.random.default_rng(0)
    for _ in range(20):
        new.copy_(torch.from_numpy(rng.standard_normal(new.shape)))
        valid.copy_(torch.from_numpy(rng.random((3, 2)) < 0.6))
        captured.check_room(2)
        graph.replay()
        captured.replayed(2)
        step(eager)
    for name in ("lengths", "counts", "positions"):
        assert torch.equal(getattr(eager, name), getattr(captured, name)), name
    used = eager.positions >= 0
    for name in ("k", "v"):
        ours, theirs = (getattr(cache, name)[:, used].float() for cache in (eager, captured))
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("window", [None, 300])
def test_chunks_of_a_prompt_are_the_whole_of_it(window):
    rng = np.random.default_rng(1)
    lengths, tokens, chunk = (1000, 777), 1024, 256
    q, k, v = (torch.from_numpy(rng.standard_normal((2, tokens, heads, 64))).cuda().bfloat16() for heads in (4, 2, 2))
    sizes = CacheSizes(1, 2, 64)
    cache = KVCache.make(sizes, 2, None if window else tokens, window=window, room=chunk if window else None, device="cuda")
    outs = []
    for start in range(0, tokens, chunk):
        step = cache.prefill_step(chunk, "zigzag", [min(max(length - start, 0), chunk) for length in lengths])
        out, cache = prefill(*(x[:, start : start + chunk] for x in (q, k, v)), cache=cache, layer=0, step=step)
        cache.advance(step)
        outs.append(out)
    got = torch.cat(outs, 1).double().cpu().numpy()
    wide = [x.double().cpu().numpy() for x in (q, k, v)]
    mask = causal() if window is None else sliding_window(window)
    dout = np.zeros((2, tokens, 4, 64))
    truth, naive = exact(*wide, mask, dout).out, plain(*wide, mask, dout, "bfloat16").out
    for row, length in enumerate(lengths):
        error = relative_error(got[row, :length], truth[row, :length])
        assert error <= bound(naive[row, :length], truth[row, :length], "bfloat16")
        assert not got[row, length:].any()


@pytest.mark.parametrize("window", [None, 300])
def test_chunks_in_global_order_have_the_bits_of_the_training_forward(window):
    mask, tokens = causal() if window is None else sliding_window(window), 1500
    q, k, v = (torch.randn(2, tokens, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
    options = {"order": "global", "length": tokens}
    expected = ring_attention(q, k, v, mask=mask, layout="contiguous", **options)
    cache = KVCache.make(CacheSizes(1, 2, 64), 2, tokens, device="cuda")
    for first, last in ((0, 1), (1, 700), (700, tokens)):
        step = cache.prefill_step(last - first, "contiguous")
        out, cache = prefill(*(x[:, first:last] for x in (q, k, v)), cache, 0, step, window=window, **options)
        assert torch.equal(out, expected[:, first:last])
        cache.advance(step)
