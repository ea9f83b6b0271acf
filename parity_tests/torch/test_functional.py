"""The functions of functional are the originals over a ring, or say by name what they refuse."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention as flex

from ring_attn_core.reference.tolerance import relative_error
from ring_attn_torch import functional

from ..support.functional import assembled
from ..support.selection import first
from .functional import DRAWS, draw, originals, over_a_ring

SOME, ALL = range(40), range(300)


def assert_exact_or_refused(name: str, seeds: range, results: list[list]) -> None:
    """``results``: what each rank returns of each draw."""
    for seed, *of_ranks in zip(seeds, *results, strict=True):
        call = draw(name, seed)
        if call.refused:
            for message in of_ranks:
                assert isinstance(message, str), f"draw {seed} is not refused: {call.refused}"
                with pytest.raises(ValueError, match=call.refused):
                    raise ValueError(message)
            continue
        assert not isinstance(of_ranks[0], str), f"draw {seed}: {of_ranks[0]}"
        lengths = dict(zip(("out", "lse", "dq", "dk", "dv"), (*[call.lengths[0]] * 3, *[call.lengths[1]] * 2), strict=True))
        got = {x: assembled([each[x] for each in of_ranks], call.layout, lengths[x]) for x in of_ranks[0]}
        try:
            call.check(got)
        except AssertionError as error:
            raise AssertionError(f"draw {seed}: {error}\n{call.arguments}") from error


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("ranks", first([1, 2, 4]))
def test_random_calls_are_exact_on_a_ring_or_refused_by_name(gloo, name, ranks):
    assert_exact_or_refused(name, SOME, gloo(ranks, over_a_ring, name, SOME))


@pytest.mark.parametrize("name", DRAWS)
def test_random_calls_are_exact_on_one_device_or_refused_by_name(name):
    assert_exact_or_refused(name, SOME, [over_a_ring(None, name, list(SOME))])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("ranks", [None, 2, 4])
def test_three_hundred_calls_are_exact_or_refused_by_name(gloo, name, ranks):
    results = gloo(ranks, over_a_ring, name, ALL) if ranks else [over_a_ring(None, name, list(ALL))]
    assert_exact_or_refused(name, ALL, results)


@pytest.mark.parametrize("name", ["scaled_dot_product_attention", "flex_attention"])
def test_what_they_are_compared_with_is_torchs_own(name):
    """To float64, so that our own bound is one of the distance to torch."""
    for call in (draw(name, seed) for seed in SOME):
        if call.refused is None and call.visible.any(2).all():
            exact = call.attention(plain=False)
            for x, theirs in originals(call).items():
                assert relative_error(theirs, exact[x]) < 1e-12, f"{x}: {call.arguments}"
