"""Both frameworks generate the same text from the same weights, greedy and drawn, on one device and on a ring."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import jax
import numpy as np
import pytest
import torch

from ring_attn_jax import sample as sample_in_jax
from ring_attn_torch import sample as sample_in_torch

from .jax import test_generate as in_jax
from .support.generation import DRAW, DRAW_EACH, DRAWN, EACH, FULL, PROMPTS, check_each
from .support.selection import first
from .torch import test_generate as in_torch

ASKED: list[dict[str, Any]] = [{"max_new_tokens": 23}, {"max_new_tokens": 20, "temperature": 1.2, "top_k": 20, "seed": 4}]


def generated_on_rank(group: Any) -> list[list[list[int]]]:
    model = in_torch.model_of("features", group)
    return [model.generate(PROMPTS, **asked) for asked in ASKED]


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2])
def test_both_frameworks_generate_the_same_text(gloo, ranks):
    with jax.enable_x64(True):
        model = in_jax.model_of("features", None if ranks == 1 else ranks)
        ours = [model.generate(PROMPTS, chunk=16 if ranks == 2 else None, **asked) for asked in ASKED]
    assert gloo(ranks, generated_on_rank) == [ours] * ranks


@pytest.mark.exhaustive
def test_both_generate_the_same_where_requests_have_numbers_of_their_own():
    with jax.enable_x64(True):
        generate = in_jax.model_of("features").generate
        ours = [generate(FULL, EACH), generate(FULL, EACH, **DRAW), generate(FULL, 9, **DRAW_EACH, seed=5)]
    assert check_each(in_torch.model_of("features").generate) == ours


@pytest.mark.slow
@pytest.mark.parametrize("sampling", first([DRAWN[i] for i in (4, 1, 3, 2)], 1, 3), ids=str)
def test_both_draw_the_same_tokens_in_float32_of_a_large_vocabulary(sampling):
    logits = np.random.default_rng(2).standard_normal((16, 5000)).astype(np.float32) * 4
    at: dict[str, Any] = {"requests": np.arange(16), "positions": np.arange(16) + 1000}
    theirs = sample_in_torch(torch.tensor(logits), **asdict(sampling), **at)
    ours = lambda logits: sample_in_jax(logits, **asdict(sampling), **at)
    assert jax.jit(ours)(logits).tolist() == theirs.tolist()
    with jax.enable_x64(True):  # float32 draws in float32
        assert jax.jit(ours)(logits).tolist() == theirs.tolist()


def test_a_row_with_numbers_of_its_own_draws_as_if_all_had_them():
    logits = np.random.default_rng(3).standard_normal((len(DRAWN), 400)).astype(np.float32) * 4
    logits[0, :9] = logits[0].max() + 1  # of equal ones the greedy row takes the first
    at, names = {"positions": list(range(7, 7 + len(DRAWN))), "seed": 3}, ("temperature", "top_k", "top_p")
    options = {name: [getattr(sampling, name) for sampling in DRAWN] for name in names}
    theirs = sample_in_torch(torch.tensor(logits), **options, **at)
    assert theirs[0] == 0
    for row, sampling in enumerate(DRAWN):
        alone = {name: getattr(sampling, name) for name in names}
        assert sample_in_torch(torch.tensor(logits), **alone, **at)[row] == theirs[row]
    ours = sample_in_jax(jax.numpy.asarray(logits), **options | {"temperature": np.array(options["temperature"])}, **at)
    assert ours.tolist() == theirs.tolist()
