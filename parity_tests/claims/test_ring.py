"""The ring against float64: out, lse and every gradient within the computed bound; and JAX = PyTorch, in float32 to 1e-6."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import pytest

from ring_attn_core import LAYOUTS, full, sliding_window

from ..fuzz import fuzz
from ..support.cases import CHOSEN, MASKS, REST, SPECIAL, Case, check, check_future_unseen, check_kept, check_same, one_hot
from ..support.combinations import COMBINATIONS, EVERYTHING, SINKS_ALONE, TREES, WITH_BLANKS, check_sinks_alone, with_nan_in_dlse
from ..support.documents import check_documents, packed
from ..support.selection import first, grid, in_each, one_in, one_of_each
from .framework import check_agree


@in_each("case", jax=first(CHOSEN, 2, 9), torch=CHOSEN)
def test_out_lse_and_gradients_are_exact(framework, case):
    check(case, framework.attention(case))


@in_each("case", jax=first(REST, 0, 0), torch=one_in(28, REST))
def test_the_rest_of_the_grid_is_exact(framework, case):
    check(case, framework.attention(case))


@in_each("case", jax=one_in(2, SPECIAL), torch=one_of_each(2, SPECIAL))
def test_cross_attention_padding_and_odd_sizes_are_exact(framework, case):
    """In JAX compiled as users compile."""
    check(case, framework.attention(case, quick=False))


@in_each("ranks", jax=first([2, 1], 0), torch=[1, 4])
def test_a_key_that_outweighs_all_others_has_probability_1_to_the_last_bit(framework, ranks):
    """However large the scores: lse is carried and comes back as it was rounded."""
    case = Case(ranks=ranks, scale=1e6)
    check(case, framework.attention(case))


IN_HALVES = [("striped", "causal", 4, "bfloat16"), ("contiguous", "full", 2, "float16")]
"""Two of CHOSEN, which JAX has compiled already."""
HALVES = [(x, mask, 2, dtype) for dtype in ("float16", "bfloat16") for x in LAYOUTS for mask in MASKS]


@in_each("layout,mask,kv_heads,dtype", jax=first(IN_HALVES, 0), torch=first(HALVES, len(HALVES) // 2))
def test_half_precision_error_does_not_grow_with_the_ring(framework, layout, mask, kv_heads, dtype):
    """As it would if the state were rounded to the inputs' dtype at each hop."""
    cases = [Case(layout, MASKS[mask], ranks, kv_heads=kv_heads, length=48, dtype=dtype) for ranks in (1, 8)]
    errors = [check(case, framework.attention(case)) for case in cases]
    for name in ("out", "dq", "dk", "dv"):
        assert errors[1][name] <= 1.1 * errors[0][name], (name, errors)


@in_each(
    "layout,ranks,token",
    jax=grid(first(dict.fromkeys(("zigzag", *LAYOUTS))), [4], [20]),
    torch=grid(LAYOUTS, first([3, 8, 1, 2, 4], 2), first([20, 1, 36], 1, 1)),
)
def test_future_tokens_change_nothing_on_any_rank(framework, layout, ranks, token):
    case = Case(layout, ranks=ranks)
    after = framework.attention(case.with_other_future(token), anew=True)
    check_future_unseen(framework.attention(case), after, token, case.length)


@in_each("case", jax=first(COMBINATIONS, 0, 5), torch=one_of_each(4, COMBINATIONS))
def test_any_two_features_together_are_exact(framework, case):
    check(case, framework.attention(case))


@in_each("case", jax=first(sorted(TREES, key=lambda case: (case.ranks != 3, case.ranks)), 1, 3), torch=TREES)
def test_key_extents_are_exact(framework, case):
    check(case, framework.attention(replace(case, poison=True)))


@in_each("case", jax=first(EVERYTHING[::-1], 1, 1), torch=EVERYTHING, ids=lambda x: getattr(x, "layout", x))
def test_every_feature_at_once_is_exact(framework, case):
    check(case, framework.attention(case))


@in_each("case", jax=first(WITH_BLANKS, 0, 5), torch=first(WITH_BLANKS, 6, 12))
def test_nan_in_hidden_tokens_changes_no_bit(framework, case):
    """With the first of COMBINATIONS, which JAX has compiled already."""
    check_same(framework.attention(replace(case, poison=True)), framework.attention(case))


def test_nan_in_dlse_of_a_query_that_sees_no_key_reaches_the_sinks_alone(framework):
    clean, other = framework.attention(SINKS_ALONE), framework.attention(with_nan_in_dlse(SINKS_ALONE), anew=True)
    check_sinks_alone(clean, other)


RINGS = [*zip(LAYOUTS, cycle((1, 2, 3)), strict=False), ("contiguous", 8)]


@in_each("layout,ranks", jax=first(RINGS, 0, 3), torch=first([*RINGS, *((a, b) for a in LAYOUTS for b in (1, 2, 3, 8))], 4))
def test_dropout_keeps_the_same_set_on_every_ring(framework, layout, ranks):
    case = one_hot(Case(layout, full(), ranks, v_dim=37, dropout_rate=0.3))
    check_kept(case, framework.attention(case, anew=True).out)


@in_each("layout", jax=first(LAYOUTS, 0, 0), torch=LAYOUTS)
def test_packed_documents_are_the_documents_one_by_one(framework, layout):
    check_documents(lambda case: framework.attention(case, anew=True), packed(Case(layout, length=61)))


OFFSETS = first([("striped", 4, 8), ("zigzag", 4, 16)], 0, 1)


@in_each("layout,ranks,offset", jax=OFFSETS, torch=grid(first(LAYOUTS, 1, 2), [3], range(17)))
def test_a_window_is_exact_at_offsets_of_up_to_2_shards(framework, layout, ranks, offset):
    for mask in (sliding_window(3, offset=offset), sliding_window(0, 2, offset=-offset)):
        case = Case(layout, mask, ranks, length=8 * ranks)
        check(case, framework.attention(case))


@in_each("problems", jax=first([2, 15], 0, 1, "campaign"), torch=[15])
def test_random_problems_are_exact(framework, problems):
    fuzz(lambda case: framework.attention(case, once=True), problems)


FLOAT32 = sorted((case for case in CHOSEN if case.dtype == "float32"), key=lambda case: case.ranks == 8)
AGREED = [
    *first(FLOAT32, 1, 3),
    *first([case for case in COMBINATIONS[:5] if case.dtype == "float32"], 0),
    *first([replace(case, dtype="float32") for case in COMBINATIONS], 0, 0),
    *first([case for case in REST if case.dtype == "float32"], 0, 0),
]
"""Those of make test-all are cases that the tests above have computed in either framework."""


@pytest.mark.parametrize("case", AGREED, ids=str)
def test_frameworks_agree(frameworks, case, record_property):
    record_property("worst", check_agree(case, *(each.attention(case) for each in frameworks)))


@pytest.mark.parametrize("case", [each for each in one_in(2, SPECIAL) if each.values[0].dtype == "float32"], ids=str)
def test_frameworks_agree_on_cross_attention_padding_and_odd_sizes(frameworks, case, record_property):
    record_property("worst", check_agree(case, *(each.attention(case, quick=False) for each in frameworks)))
