"""Dilated attention against a dense float64 oracle: out, lse and every gradient within the computed bound; and JAX = PyTorch."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from ring_attn_core import full
from ring_attn_core.reference.tolerance import relative_error

from ..support.dilated import CASES, PUBLISHED, Case, by_name, check, drawn
from ..support.selection import first, in_each, one_of_each

IN_CI = [CASES[2], CASES[13]]
OTHERS = [case for case in CASES if case not in IN_CI]
RINGS = [*product(["softmax", "heads"], [1, 2, 3, 4, 8])]


@in_each("case", jax=first([*IN_CI, *OTHERS], 1, 2), torch=one_of_each(2, CASES), slow="jax")
def test_out_lse_and_gradients_are_exact(framework, case):
    check(case, framework.dilated(case))


@in_each("mixing,ranks", jax=first(RINGS, 0, 0), torch=RINGS)
def test_every_ring_is_exact_at_an_odd_length(framework, mixing, ranks):
    check(case := Case((7, 12, 90), (1, 4, 3), ranks, -(-37 // ranks), 4, 2, mixing, length=37), framework.dilated(case))


@pytest.mark.full
def test_the_published_setting_is_exact(framework):
    check(PUBLISHED, framework.dilated(PUBLISHED))


@in_each("seeds", jax=first([range(20)], 0, 0), torch=first([range(15), range(15, 1000)], 0, 1, "campaign"))
def test_random_configurations_are_exact(framework, seeds):
    for seed in seeds:
        check(case := drawn(np.random.default_rng(seed), 4), framework.dilated(case))


@in_each("case,token", jax=[(CASES[2], 9)], torch=[(CASES[2], 1), (CASES[5], 9), (CASES[2], 20)])
def test_future_tokens_change_nothing_on_any_rank(framework, case, token):
    later = {name: np.concatenate([x[:, :token], -3 * x[:, token:]], 1) for name, x in case.arrays.items() if name in "qkv"}
    before, after = framework.dilated(case), framework.dilated(replace(case).given(**later))
    for name in ("out", "lse"):
        np.testing.assert_array_equal(getattr(before, name)[:, :token], getattr(after, name)[:, :token])
    assert (before.out[:, token:] != after.out[:, token:]).any()


@in_each("ranks", jax=first([3], 0), torch=[3])
def test_tokens_of_another_segment_and_of_another_offset_change_nothing(framework, ranks):
    case = Case((8,), (4,), ranks=ranks, heads=4, kv_heads=4, mask=full())
    changed = np.zeros(case.tokens, bool)
    changed[8:16] = True
    changed[[0, 1, 3]] = True  # head 2 keeps 2 and 6
    other = {name: np.where(changed[:, None, None], -3 * case.arrays[name], case.arrays[name]) for name in "qkv"}
    before, after = framework.dilated(case), framework.dilated(replace(case).given(**other))
    np.testing.assert_array_equal(before.out[:, 16:], after.out[:, 16:])
    np.testing.assert_array_equal(before.out[:, 2:8:4, 2], after.out[:, 2:8:4, 2])
    assert (before.out[:, 10:16:4, 2] != after.out[:, 10:16:4, 2]).all()


@in_each("ranks", jax=first([2], 0), torch=[2])
def test_a_token_that_every_pattern_leaves_out_is_0_and_has_no_gradient(framework, ranks):
    case = Case((8, 16), (4, 8), ranks=ranks, heads=2, kv_heads=2)
    left_out = [p for p in range(case.tokens) if p % 4 > 1]
    for name, x in by_name(framework.dilated(case)).items():
        np.testing.assert_array_equal(x[:, left_out], -np.inf if name == "lse" else 0, err_msg=name)


def qkv(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((3, *shape), np.float32)


def attended(framework: Any, function: str, arrays: Any, **options: Any) -> np.ndarray:
    return framework.numpy(framework.alone(function)(*map(framework.array, arrays), **options))


@pytest.mark.parametrize(("huge", "same"), [((3 * 2**30, 3), (9, 3)), ((2**40, 2), (8, 2)), ((2**40, 2**40), (8, 8))])
def test_patterns_of_more_tokens_than_int32_counts_are_those_of_the_whole_sequence(framework, huge, same):
    pattern = lambda segment, dilation: {"segments": (segment,), "dilations": (dilation,)}
    got, whole = (attended(framework, "dilated_attention", qkv(1, 8, 2, 4), **pattern(*of)) for of in (huge, same))
    np.testing.assert_array_equal(got, whole)
    assert whole.any()


def test_one_pattern_over_everything_is_ring_attention(framework):
    mine = attended(framework, "dilated_attention", qkv(1, 12, 4, 8), segments=(12,), dilations=(1,))
    exact = attended(framework, "ring_attention", qkv(1, 12, 4, 8), layout="contiguous", backend="blockwise")
    np.testing.assert_allclose(mine, exact, rtol=0, atol=1e-6 if framework.name == "jax" else 0)


@in_each("tokens,factor", jax=[(0, 1), *first([(16, 1e4)], 0)], torch=[(0, 1), (16, 1e4)])
def test_no_tokens_give_no_tokens_and_nothing_is_lost_where_scores_are_huge(framework, tokens, factor):
    options = {"segments": (4, 8), "dilations": (1, 2), "scale": float(factor)}
    leaves = qkv(2, tokens, 4, 8) * np.float32(factor)
    (out,), gradients = framework.pull(lambda *x: framework.alone("dilated_attention")(*x, **options), leaves)
    assert all(x.shape == (2, tokens, 4, 8) and np.isfinite(x).all() for x in (out, *gradients))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"segments": (8, 8)}, "strictly increasing"),
        ({"dilations": (1, 3)}, "a dilation must divide its segment, got 3 for a segment of 8"),
        ({"mixing": "heads", "segments": (1, 2, 3, 4, 5), "dilations": (1,) * 5}, "got 5 patterns for 4 heads"),
        ({"length": 40}, "length=40 is more than"),
        ({"key_mask": np.ones((2, 3), bool)}, "key_mask must be"),
    ],
)
def test_invalid_segments_dilations_length_and_key_mask_are_refused(framework, wrong, message):
    options = {"segments": (4, 8), "dilations": (1, 2)} | framework.arrays(wrong)
    with pytest.raises(ValueError, match=message):
        attended(framework, "dilated_attention", qkv(2, 16, 4, 8), **options)


@pytest.mark.parametrize("case", first([x for x in [*IN_CI, *OTHERS] if x.dtype == "float32"], 1, 2), ids=str)
def test_frameworks_agree(frameworks, case):
    ours, theirs = (by_name(each.dilated(case)) for each in frameworks)
    for name, x in ours.items():
        assert relative_error(x, theirs[name]) <= 1e-6, name
