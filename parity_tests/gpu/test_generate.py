"""Generation on a GPU: tokens of replayed CUDA graphs are those of eager steps, and the same in JAX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ring_attn_torch import KVCache, RingTransformer, to_numpy
from ring_attn_torch.inference import decode_loop

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SIZES: dict[str, Any] = {"vocab": 300, "dim": 128, "depth": 2, "heads": 4, "kv_heads": 2, "head_dim": 64, "windows": (33, None)}
HYBRID: dict[str, Any] = {"depth": 3, "windows": (None, None, 33), "mixers": ("mamba2", "gated_delta_net", "attention")}
MODELS = pytest.mark.parametrize("options", [{}, HYBRID], ids=["attention", "hybrid"])
PROMPTS = [[int(x) for x in np.random.default_rng(i).integers(0, 300, n)] for i, n in enumerate((5, 301, 64))]
ASKED: list[dict[str, Any]] = [{}, {"chunk": 100}, {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 3}]


def made(**options: Any) -> RingTransformer:
    torch.manual_seed(0)
    model = RingTransformer(**SIZES | options, sinks=True, softcap=20.0, param_dtype="float32", compute_dtype="bfloat16")
    return model.cuda()


class Eager(decode_loop.DecodeLoop):
    """One that captures nothing."""

    def step(self) -> None:
        self._compute()
        self._steps += 1


@MODELS
@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_a_replayed_step_draws_what_eager_steps_draw(asked, options, monkeypatch):
    model = made(**options)
    captured = model.generate(PROMPTS, 40, **asked)
    stop = [captured[0][6], captured[1][9]]
    ended = model.generate(PROMPTS, 40, **asked, stop=stop)
    monkeypatch.setattr("ring_attn_torch.inference.generate.DecodeLoop", Eager)
    assert model.generate(PROMPTS, 40, **asked) == captured
    assert model.generate(PROMPTS, 40, **asked, stop=stop) == ended
    for new, all_of_them in zip(ended, captured, strict=True):
        assert new == all_of_them[: len(new)]


@pytest.mark.parametrize("asked", ASKED[::2], ids=str)
def test_a_replayed_step_leaves_out_who_has_all_its_tokens(asked, monkeypatch):
    """The second prompt fills its part of the cache, in the prefill or in a replayed step, long before the first one ends."""
    model, caches = made(), []

    class Kept(decode_loop.DecodeLoop):
        def __init__(self, model: Any, cache: KVCache, asked: Any) -> None:
            super().__init__(model, cache, asked)
            caches.append(cache)

    monkeypatch.setattr("ring_attn_torch.inference.generate.DecodeLoop", Kept)
    prompts = [PROMPTS[0], PROMPTS[1] + PROMPTS[2][:19], PROMPTS[2]]  # of 5, 320 and 64 tokens
    for full, new in ((320, [40, 1, 9]), (315, [40, 6, 2])):
        cut = [prompts[0], prompts[1][:full], prompts[2]]
        got = model.generate(cut, new, **asked)
        assert caches[-1].spec.capacity == 320
        assert caches[-1].lengths.tolist() == [len(prompt) + n - 1 for prompt, n in zip(cut, new, strict=True)]
        longer = model.generate(cut, [40, new[1], 40], **asked)  # of a cache of the same size
        assert got == [row[:n] for row, n in zip(longer, new, strict=True)]
        with monkeypatch.context() as patched:
            patched.setattr("ring_attn_torch.inference.generate.DecodeLoop", Eager)
            assert model.generate(cut, new, **asked) == got


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@MODELS
def test_a_step_keeps_the_host_from_nothing_but_its_tokens(options):
    """Between two tokens the host asks the device for nothing: an unexpected synchronization raises here."""
    model, came = made(**options), []

    def on_token(request: int, token: int) -> None:
        came.append(token)
        torch.cuda.set_sync_debug_mode("error" if len(came) > 6 else "default")

    try:
        model.generate(PROMPTS, [12, 4, 12], on_token=on_token)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(came) == 28


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("current", [0, 1])
def test_a_model_on_another_gpu_draws_the_same(current):
    """Also while that GPU is not the current one. torch's own stream for captures stays on the GPU of the first capture."""
    expected = made().to("cuda:0").generate(PROMPTS, 24)
    with torch.cuda.device(current):
        assert made().to("cuda:1").generate(PROMPTS, 24) == expected


@MODELS
@pytest.mark.parametrize("ranks", sorted({1, max(torch.cuda.device_count(), 1)}))
def test_jax_generates_the_same_text_in_float32(ranks, options):
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU")
    from flax import nnx

    from ring_attn_jax import RingTransformer as InJax
    from ring_attn_jax import from_numpy

    torch.manual_seed(0)
    model = RingTransformer(**SIZES | options).cuda()
    mesh = jax.make_mesh((ranks,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    other = from_numpy(InJax(**SIZES | options, mesh=mesh, rngs=nnx.Rngs(0)), to_numpy(model))
    with jax.default_matmul_precision("highest"):
        expected = model.generate(PROMPTS, 24)
        assert other.generate(PROMPTS, 24) == expected
        stop = [expected[0][6]]
        assert other.generate(PROMPTS, 24, stop=stop) == model.generate(PROMPTS, 24, stop=stop)
