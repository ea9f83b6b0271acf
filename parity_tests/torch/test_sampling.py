"""Drawing tokens in PyTorch: what the reference draws, what generate draws, and what is refused."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

from ring_attn_core.reference import sampling as reference
from ring_attn_core.sampling import Sampling
from ring_attn_torch import KVCache, decode_step, prefill_prompts, sample
from ring_attn_torch.inference import sampling as drawing

from ..support.generation import BAD_DRAWS, DRAW, DRAWN, PROMPTS
from ..support.selection import first
from .models import Group
from .test_generate import model_of


@pytest.mark.parametrize("sampling", DRAWN, ids=str)
def test_tokens_are_those_that_the_reference_draws(sampling):
    logits = np.random.default_rng(0).standard_normal((40, 50)) * 3
    logits[:, 7] = logits[:, 4] = logits.max(-1)  # ties
    requests, positions = [i * 3 for i in range(40)], [i * i for i in range(40)]
    got = sample(torch.tensor(logits), **asdict(sampling), requests=requests, positions=torch.tensor(positions))
    expected = [reference.sample(*x) for x in zip(logits, [sampling] * 40, requests, positions, strict=True)]
    assert got.tolist() == expected
    assert got.dtype == torch.int64


@pytest.mark.parametrize("sampling", DRAWN[1:], ids=str)
def test_tokens_are_drawn_as_often_as_they_are_probable(sampling):
    logits, draws = np.random.default_rng(1).standard_normal(12) * 2, 20_000
    many = torch.tensor(logits, dtype=torch.float32).expand(draws, -1)
    got = sample(many, **asdict(sampling), requests=torch.arange(draws) % 7, positions=torch.arange(draws) // 7)
    p = reference.probabilities(logits, sampling)
    counts = np.bincount(got.numpy(), minlength=12)
    assert not counts[p == 0].any()
    expected = draws * p[p > 0]
    free = (p > 0).sum() - 1
    chi_square = ((counts[p > 0] - expected) ** 2 / expected).sum()
    assert chi_square < free + 5 * np.sqrt(2 * free)


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
def test_whatever_bits_are_drawn_the_noise_is_finite(bits, monkeypatch):
    monkeypatch.setattr(drawing, "words", lambda *_: torch.full((1, 3), bits))
    at = torch.zeros(1, dtype=torch.long)
    for dtype in (torch.float32, torch.float64):
        assert drawing.gumbel(Sampling(1.0).parameters, at, at, torch.arange(3)[None], dtype).isfinite().all()


def test_of_equal_logits_the_lower_token_ids_are_kept():
    got = sample(torch.zeros(200, 3000), temperature=1.0, top_k=3, positions=torch.arange(200))
    assert set(got.tolist()) == {0, 1, 2}


def test_of_numbers_their_low_32_bits_count():
    logits = torch.randn(2, 300, generator=torch.manual_seed(0))
    draw = lambda **numbers: sample(logits, temperature=2.0, **numbers).tolist()
    assert draw(requests=[2**31, 2**40 + 7], positions=[2**63, -1]) == draw(requests=[2**31, 7], positions=[0, 2**32 - 1])


@pytest.mark.parametrize(("changes", "message"), BAD_DRAWS.values(), ids=BAD_DRAWS)
def test_what_does_not_fit_is_refused(changes, message):
    options = dict(changes)
    shape, dtype = options.pop("logits", (2, 5)), options.pop("dtype", "float32")
    with pytest.raises(ValueError, match=message):
        sample(torch.ones(shape, dtype=getattr(torch, dtype)), **options)
