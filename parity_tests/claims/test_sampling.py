"""Drawing tokens: what the reference draws, as often as it is probable, and what is refused."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

import numpy as np
import pytest

from ring_attn_core.reference import sampling as reference

from ..support.generation import BAD_DRAWS, DRAWN
from ..support.selection import first, in_each


@pytest.mark.parametrize("sampling", DRAWN, ids=str)
def test_tokens_are_those_that_the_reference_draws(framework, sampling):
    logits = np.random.default_rng(0).standard_normal((40, 50)) * 3
    logits[:, 7] = logits[:, 4] = logits.max(-1)  # ties
    requests, positions = [i * 3 for i in range(40)], [i * i for i in range(40)]
    with framework.x64():
        draw = framework.compiled(partial(framework.sample, **asdict(sampling), requests=requests, positions=positions))
        got = draw(framework.array(logits))
    assert got.tolist() == [reference.sample(*x) for x in zip(logits, [sampling] * 40, requests, positions, strict=True)]
    assert str(got.dtype).removeprefix("torch.") == ("int32" if framework.name == "jax" else "int64")


@in_each("sampling", jax=first(DRAWN[1:], 0), torch=DRAWN[1:])
def test_tokens_are_drawn_as_often_as_they_are_probable(framework, sampling):
    logits, draws = np.random.default_rng(1).standard_normal(12) * 2, 20_000
    many = framework.array(np.broadcast_to(logits.astype(np.float32), (draws, 12)))
    numbers = {"requests": framework.array(np.arange(draws) % 7), "positions": framework.array(np.arange(draws) // 7)}
    got = framework.compiled(partial(framework.sample, **asdict(sampling), **numbers))(many)
    p = reference.probabilities(logits, sampling)
    counts = np.bincount(np.asarray(got), minlength=12)
    assert not counts[p == 0].any()
    expected = draws * p[p > 0]
    free = (p > 0).sum() - 1
    chi_square = ((counts[p > 0] - expected) ** 2 / expected).sum()
    assert chi_square < free + 5 * np.sqrt(2 * free)


def test_top_k_keeps_the_lower_token_ids_of_equal_logits(framework):
    draw = framework.compiled(partial(framework.sample, temperature=1.0, top_k=3, positions=framework.array(np.arange(200))))
    assert set(draw(framework.array(np.zeros((200, 3000), np.float32))).tolist()) == {0, 1, 2}


@in_each("positions", jax=first([[2**63, -1]], 0), torch=[[2**63, -1]])
def test_only_the_low_32_bits_of_requests_and_positions_count(framework, positions):
    logits = framework.array(np.random.default_rng(0).standard_normal((2, 300), np.float32))
    draw = lambda **numbers: framework.sample(logits, temperature=2.0, **numbers).tolist()
    assert draw(requests=[2**31, 2**40 + 7], positions=positions) == draw(requests=[2**31, 7], positions=[0, 2**32 - 1])


@pytest.mark.parametrize(("changes", "message"), BAD_DRAWS.values(), ids=BAD_DRAWS)
def test_invalid_arguments_of_sample_are_refused(framework, changes, message):
    options = dict(changes)
    logits = framework.array(np.ones(options.pop("logits", (2, 5))), options.pop("dtype", "float32"))
    with pytest.raises(ValueError, match=message):
        framework.sample(logits, **options)
