"""Decoding gives the same numbers in both frameworks on a CPU: in float32 to 1e-6."""

from __future__ import annotations

import pytest

pytest.importorskip("jax")
pytest.importorskip("torch")

from ring_attn_core.reference.tolerance import relative_error

from .jax import decode as on_jax
from .support.decode import SHAPES, Problem, random_shape
from .support.selection import first
from .torch import decode as on_torch

SAME = 1e-6


@pytest.mark.parametrize("number", first(number for number in range(2, SHAPES) if random_shape(number).dtype == "float32"))
def test_both_frameworks_give_the_same_numbers(gloo, number):
    problems = [Problem(random_shape(number), seed) for seed in range(2)]
    for problem, ours in zip(problems, on_torch.run(gloo, problems), strict=True):
        for mine, other in zip(ours, on_jax.run(problem), strict=True):
            assert relative_error(mine, other) <= SAME
