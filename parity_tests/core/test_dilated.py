"""Dilated attention's arithmetic against its definition, token by token; its checks; the steps of a ring that somebody needs."""

# pyright: reportArgumentType=false

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from ring_attn_core import RingPlan, causal, full
from ring_attn_core.problem.options import Options
from ring_attn_core.problem.problem import Problem
from ring_attn_core.reference import oracle
from ring_attn_core.reference.dilated import DilatedFeatures, exact, patterns
from ring_attn_core.variants.dilated import FoldedBatches, Patterns, batches_of

from ..support.dilated import CASES, Case, by_name, drawn


def problem(case: Case) -> Problem:
    q, kv = (case.batch, case.local, case.heads, case.head_dim), (case.batch, case.local, case.kv_heads, case.head_dim)
    options = Options(layout="contiguous", mask=case.mask, length=case.length)
    return Problem(q, kv, kv, ("float32",) * 3, "cpu", case.ranks, options)


def lanes(case: Case) -> tuple[FoldedBatches, ...]:
    return batches_of(problem(case), Patterns(case.segments, case.dilations, case.mixing))


RANDOM = [drawn(np.random.default_rng(seed), ranks) for seed, ranks in product(range(12), (1, 2, 3, 4, 8))]


@pytest.mark.parametrize("case", [*CASES, *RANDOM], ids=str)
def test_lanes_hold_every_kept_token_once_and_see_what_the_definition_says(case):
    """Slot for slot: the pairs that band, extents and key mask let through are those of the definition, for every head."""
    positions = np.arange(case.tokens)
    expected = patterns(case.call, case.heads, positions, positions).astype(bool)
    expected &= oracle.visible(case.mask, range(case.tokens), range(case.tokens))
    for at, each in enumerate(lanes(case)):
        for t in range(each.head_groups):
            slots = [(rank, slot) for rank in range(each.ranks) for slot in range(each.slots)]
            told = [each.visible(rank, slot, t) for rank, slot in slots]
            tokens = {i: each.position(rank, slot, t) for i, (rank, slot) in enumerate(slots) if told[i][0]}
            assert all(each.slot_of(p) == i and p // case.local == slots[i][0] for i, p in tokens.items())
            seen = np.zeros((case.tokens, case.tokens), bool)
            for i, p in tokens.items():
                first, end = told[i][1:] if each.needs_extents else (0, len(slots))
                assert each.needs_key_mask or not each.needs_extents or all(j in tokens for j in range(first, end))
                seen[p, [tokens[j] for j in range(first, end) if j in tokens and each.band.sees(i, j)]] = True
            heads = range(each.first + t, each.first + each.heads, each.dilation)
            for h in heads:
                np.testing.assert_array_equal(seen, expected[at, h], err_msg=f"{each} head {h}")


@pytest.mark.parametrize("case", [*CASES, *RANDOM], ids=str)
def test_the_steps_reach_whatever_is_seen_and_no_rank_without_a_segment_in_common(case):
    positions = np.arange(case.tokens)
    for segment, each in zip(case.segments, lanes(case), strict=True):
        together = positions[:, None] // segment == positions // segment
        together &= oracle.visible(case.mask, range(case.tokens), range(case.tokens))[0]
        i, j = np.nonzero(together)
        assert set(each.steps) == {0, *((i // case.local - j // case.local) % case.ranks).tolist()}
        assert each.options(Options()).steps in (None, each.steps)


def test_the_oracle_of_one_pattern_over_everything_is_attention():
    case = Case((32,), (1,), kv_heads=2)
    for name, x in by_name(oracle.exact(mask=case.mask, **case.arrays)).items():
        np.testing.assert_allclose(by_name(case.expected)[name], x, rtol=1e-12, atol=1e-12, err_msg=name)


def test_the_oracle_weighs_patterns_by_their_denominators():
    case = Case((8, 32), (1, 2))
    each = [exact(**case.arrays, call=DilatedFeatures((w,), (r,))) for w, r in zip(case.segments, case.dilations, strict=True)]
    z = [np.exp(x.lse)[..., None] for x in each]
    np.testing.assert_allclose(case.expected.out, (z[0] * each[0].out + z[1] * each[1].out) / (z[0] + z[1]))
    np.testing.assert_allclose(case.expected.lse, np.log(z[0] + z[1])[..., 0])


def test_the_gradients_of_the_oracle_are_its_differences():
    case = Case((6, 13), (2, 1), ranks=1, local=13, heads=2, kv_heads=1, batch=1, dtype="float64", length=13)
    arrays = {name: x.astype(np.float64) for name, x in case.arrays.items()}
    rng = np.random.default_rng(5)

    def value(**changed: np.ndarray) -> float:
        got = exact(**(arrays | changed), call=case.call)
        return float((got.out * arrays["dout"]).sum() + (got.lse * arrays["dlse"]).sum())

    for name, gradient in zip("qkv", case.expected[2:5], strict=True):
        direction = rng.standard_normal(arrays[name].shape)
        ahead, behind = (value(**{name: arrays[name] + step * direction}) for step in (1e-6, -1e-6))
        assert (ahead - behind) / 2e-6 == pytest.approx(float((gradient * direction).sum()), rel=1e-6)


WRONG = {
    "no tuple": ({"segments": 8}, "segments must be a tuple of ints, counts of tokens, one for each pattern, got 8"),
    "no ints": (
        {"dilations": (1.0, 2)},
        "dilations must be a tuple of ints, counts of tokens, one for each pattern, got (1.0, 2)",
    ),
    "none": ({"segments": (), "dilations": ()}, "pass one dilation for each segment, and at least one of both, got segments=()"),
    "not equally many": ({"dilations": (1,)}, "pass one dilation for each segment, and at least one of both"),
    "not increasing": (
        {"segments": (16, 8)},
        "segments must be at least 1 token long and strictly increasing, got (16, 8): sort",
    ),
    "no dilation": ({"dilations": (0, 2)}, "a dilation must be at least 1, got 0 in (0, 2): 1 keeps every token"),
    "not dividing": (
        {"dilations": (1, 3)},
        "a dilation must divide its segment, got 3 for a segment of 16 tokens: pass a segment of 15 or 18",
    ),
    "mixing": (
        {"mixing": "sum"},
        'mixing must be "softmax", every head uses all patterns, or "heads", each uses one, got \'sum\'',
    ),
    "heads": (
        {"heads": 1, "kv_heads": 1, "mixing": "heads"},
        'mixing="heads" gives every pattern a group of heads, got 2 patterns for 1 heads: pass fewer patterns, or mixing=',
    ),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_invalid_segments_and_dilations_are_refused_in_words(wrong):
    changes, message = wrong
    with pytest.raises(ValueError, match=re.escape(message)):
        lanes(replace(Case(), **changes))


def test_keys_of_another_length_are_refused():
    other = replace(problem(Case()), k_shape=(2, 9, 4, 8), v_shape=(2, 9, 4, 8))
    with pytest.raises(ValueError, match="q has 8 tokens and k has 9"):
        batches_of(other, Patterns((8,), (1,)))


def test_a_plan_has_the_steps_that_it_is_told():
    plan = RingPlan("contiguous", full(), 4, 8, steps=(0, 3))
    assert (plan.shifts, plan.hops, plan.home) == ((0, 3), (3,), 1)
    assert plan.blanks
    assert plan.blank_keys
    assert RingPlan("contiguous", full(), 4, 8).shifts == (0, 1, 2, 3)
    assert RingPlan("contiguous", causal(), 4, 8, steps=(0,)).home == 0


@pytest.mark.parametrize("steps", [(), (1,), (0, 2, 1), (0, 0), [0, 1], (0, 1.0), (0, True), 0, (0, 4)])
def test_a_plan_refuses_invalid_steps(steps):
    with pytest.raises(ValueError, match="steps "):
        RingPlan("contiguous", full(), 4, 8, steps=steps)


@pytest.mark.parametrize("steps", [None, (0,), (0, 3)])
def test_the_steps_are_part_of_the_text_and_of_what_ranks_compare(steps):
    options = Options(layout="contiguous", steps=steps)
    assert Options.read(options.text, options.counts) == options
    asked = replace(problem(Case()), options=options)
    assert asked.fingerprint()["steps"] == steps
    assert asked.plan.steps == steps
