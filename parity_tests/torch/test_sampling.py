"""Drawing tokens in PyTorch: what the reference draws, what generate draws, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ring_attn_core.sampling import Sampling
from ring_attn_torch import KVCache, decode_step, prefill_prompts, sample
from ring_attn_torch.inference import sampling as drawing

from ..support.generation import DRAW, PROMPTS
from ..support.selection import first
from .models import Group
from .test_generate import model_of


def loop_on_rank(group: Group, options: dict[str, Any]) -> tuple[list[list[int]], list[list[int]]]:
    """The tokens of generate, and those of a loop of one's own."""
    model = model_of("features", group)
    cache = KVCache.make(model.config, 3, 48, dtype="float64", group=group)
    ids = torch.tensor([[*prompt, *[0] * (21 - len(prompt))] for prompt in PROMPTS])
    logits, cache = prefill_prompts(model, ids, cache, [len(prompt) for prompt in PROMPTS])
    tokens = [sample(logits, **options, positions=cache.lengths)]
    for _ in range(11):
        logits, cache = decode_step(model, tokens[-1][:, None], cache)
        tokens.append(sample(logits[:, -1], **options, positions=cache.lengths))
    return model.generate(PROMPTS, 12, **options), torch.stack(tokens, 1).tolist()


@pytest.mark.parametrize("options", first([DRAW, {}]), ids=["drawn", "greedy"])
def test_a_loop_over_steps_draws_what_generate_draws(gloo, options):
    for ranks in (1, 2):
        for expected, got in gloo(ranks, loop_on_rank, options):
            assert got == expected


def test_it_is_a_request_of_its_number_and_neither_its_row_nor_autocast_nor_a_gradient_counts():
    logits = torch.randn(5, 300, generator=torch.manual_seed(0), requires_grad=True)
    at = torch.arange(5) * 1000
    whole = sample(logits, temperature=2.0, top_p=0.9, seed=3, positions=at)
    assert not whole.requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        back = sample(logits.flip(0), temperature=2.0, top_p=0.9, seed=3, requests=[4, 3, 2, 1, 0], positions=at.flip(0))
    assert back.flip(0).tolist() == whole.tolist()
    assert sample(logits, temperature=2.0, top_p=0.9, seed=3, positions=at + 1).tolist() != whole.tolist()


@pytest.mark.parametrize("bits", [0, 2**32 - 1])
def test_the_noise_is_finite_for_the_least_and_the_greatest_bits(bits, monkeypatch):
    monkeypatch.setattr(drawing, "words", lambda *_: torch.full((1, 3), bits))
    at = torch.zeros(1, dtype=torch.long)
    for dtype in (torch.float32, torch.float64):
        assert drawing.gumbel(Sampling(1.0).parameters, at, at, torch.arange(3)[None], dtype).isfinite().all()
