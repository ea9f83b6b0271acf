"""Summary attention: out, lse and every gradient against float64; what leaks, what is refused; and JAX = PyTorch."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from ring_attn_core.reference.summary import SummaryAttended
from ring_attn_core.reference.tolerance import relative_error

from ..support.selection import first, in_each
from ..support.summaries import CASES, COMPILED, EXACT, MEAN, MORE, REFUSED, SummaryCase, refused

RINGS = [CASES[i] for i in (3, 0, 5, 1, 2)]
"""Rings of 3, 4, 8, 1 and 2 ranks; make test has the first in JAX."""

OTHERS = [case for case in [*CASES, *EXACT, *MORE] if case not in RINGS]


@in_each("case", jax=[*first(RINGS), *first(OTHERS, 0, 0)], torch=first([*CASES, *EXACT, *MORE], len(CASES + EXACT)), slow="jax")
def test_out_lse_and_all_gradients_are_as_near_to_float64_as_one_devices(framework, case):
    case.check(framework.summary(case))


def exact_attention(framework: Any, arrays: Any) -> np.ndarray:
    q, k, v, *key_mask = (framework.array(arrays[name]) for name in ("q", "k", "v", "key_mask") if name in arrays)
    given = {"key_mask": key_mask[0]} if key_mask else {}
    return framework.numpy(framework.alone("ring_attention")(q, k, v, layout="contiguous", **given))


@in_each("case", jax=[*first(EXACT[:1], 0), *first(EXACT[1:], 0, 0)], torch=EXACT)
def test_summaries_of_every_token_are_exact_attention(framework, case):
    out, *_ = framework.summary(case)
    np.testing.assert_allclose(out[:, : case.length], exact_attention(framework, case.arrays), rtol=0, atol=2e-6)


EVERY = [SummaryCase(ranks, block=5, window=3) for ranks in (1, 2, 4, 8)]


@in_each("case", jax=first([CASES[0], CASES[5]], 0), torch=EVERY)
def test_later_tokens_change_nothing_on_any_rank(framework, case):
    """To the bit, with every token from one on changed: at the start of a block, within it, and its last one."""
    before = framework.summary(case)
    for token in (20, 23, 24, 26):
        later = lambda x, token=token: np.concatenate([x[:, :token], -3 * x[:, token:]], 1)
        after = framework.summary(case.given(**{name: later(case.arrays[name]) for name in "qkv"}))
        for a, b in zip(before[:2], after[:2], strict=True):
            np.testing.assert_array_equal(a[:, :token], b[:, :token])
            assert (a[:, token : case.length] != b[:, token : case.length]).any()


@in_each("ranks", jax=first([4], 0), torch=[4])
def test_tokens_beyond_the_window_are_seen_through_their_summaries_alone(framework, ranks):
    """Two tokens of a block that move apart, so that its mean stays: who sees the tokens notices, who sees the mean does not."""
    case = SummaryCase(ranks, block=5, window=3, summaries=1, pooling=MEAN)
    moved = {}
    for name in "kv":
        moved[name] = case.arrays[name].copy()
        moved[name][:, 11] += 1
        moved[name][:, 13] -= 1
    before, after = framework.summary(case)[0], framework.summary(case.given(**moved))[0]
    first = lambda i: 5 * (max(i - 3, 0) // 5)
    last = max(i for i in range(case.length) if first(i) <= 13)
    assert (np.abs(before - after)[:, 11 : last + 1].max((0, 2, 3)) > 1e-3).all()
    np.testing.assert_allclose(before[:, last + 1 : case.length], after[:, last + 1 : case.length], rtol=0, atol=1e-6)
    np.testing.assert_array_equal(before[:, :11], after[:, :11])


@in_each("ranks", jax=first([1], 0), torch=[1])
def test_the_pool_has_a_gradient_where_no_block_is_summarized(framework, ranks):
    assert not framework.summary(SummaryCase(ranks, window=36))[-1].any()


def test_one_summary_starts_as_the_mean_and_several_start_apart(framework):
    make = partial(framework.make, "SummaryAttention", 8, 2, block=4, window=3)
    pool = lambda layer: framework.to_numpy(layer)["pool"]
    assert not pool(make()).any()
    assert (np.diff(pool(make(summaries=2)), axis=0) != 0).any()
    assert make(pooling=MEAN).pool is None
    with pytest.raises(ValueError, match="summaries must be an int of at least 1"):
        make(summaries=0)
    with pytest.raises(ValueError, match=r"x must be \[batch, tokens, 8\], got \[1, 8\]"):
        make()(framework.array(np.ones((1, 8), np.float32)))


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_invalid_options_and_shapes_are_refused(framework, change, message):
    arrays, options = refused(change)
    with pytest.raises(ValueError, match=message):
        framework.alone("summary_attention")(**framework.arrays(arrays), **options)


@pytest.mark.parametrize("asked", [{"block": 2**40, "window": 1}, {"block": 2**31, "window": 1}, {"block": 4, "window": 2**40}])
def test_blocks_and_windows_of_more_tokens_than_int32_counts_are_exact_attention(framework, asked):
    arrays = dict(zip("qkv", np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4), np.float32), strict=True))
    got = framework.alone("summary_attention")(**framework.arrays(arrays), **asked, pooling=MEAN)
    np.testing.assert_allclose(framework.numpy(got), exact_attention(framework, arrays), rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", first([case for case in COMPILED if case.dtype == "float32"][:2], 0), ids=str)
def test_frameworks_agree(frameworks, case):
    ours, theirs = (each.summary(case) for each in frameworks)
    finite = lambda x: x[:, : case.length] if x.ndim > 3 or x.shape[1:2] != (case.kv_heads,) else x
    both = zip(SummaryAttended._fields, ours, theirs, strict=True)
    errors = {name: relative_error(finite(a), finite(b)) for name, a, b in both if a is not None and b is not None}
    assert max(errors.values()) <= 1e-6, errors
