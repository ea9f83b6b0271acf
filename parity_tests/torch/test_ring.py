"""The PyTorch ring against float64: out, lse and every gradient within the computed bound, on gloo."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from ring_attn_core import LAYOUTS, full, sliding_window
from ring_attn_core.dropout import WORD, keep_mask
from ring_attn_torch import ring_attention
from ring_attn_torch.attend import dropout

from ..fuzz import fuzz
from ..support.cases import (
    CHOSEN,
    MASKS,
    REST,
    SPECIAL,
    Case,
    check,
    check_future_unseen,
    check_kept,
    check_same,
    one_hot,
)
from ..support.combinations import (
    COMBINATIONS,
    EVERYTHING,
    SINKS_ALONE,
    TREES,
    WITH_BLANKS,
    check_sinks_alone,
    with_nan_in_dlse,
)
from ..support.documents import check_documents, packed
from ..support.selection import first, one_in, one_of_each
from .ring import run, run_or_restart


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_out_lse_and_gradients_are_exact(gloo, case):
    check(case, run(gloo, case))


@pytest.mark.parametrize("case", one_in(28, REST), ids=str)
def test_the_rest_of_the_grid_is_exact(gloo, case):
    check(case, run(gloo, case))


@pytest.mark.parametrize("case", one_of_each(2, SPECIAL), ids=str)
def test_cross_attention_padding_and_odd_sizes_are_exact(gloo, case):
    check(case, run(gloo, case))


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_key_that_outweighs_all_others_has_probability_1_to_the_last_bit(gloo, ranks):
    """However large the scores: lse is carried and comes back as it was rounded."""
    case = Case(ranks=ranks, scale=1e6)
    check(case, run(gloo, case))


@pytest.mark.parametrize("dtype", first(["float16", "bfloat16"]))
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_precision_error_does_not_grow_with_the_ring(gloo, layout, mask, dtype):
    """As it would if the state were rounded to the inputs' dtype at each hop."""
    errors = [check(case, run(gloo, case)) for case in (Case(layout, mask, ranks, dtype=dtype, length=48) for ranks in (1, 8))]
    for name in ("out", "dq", "dk", "dv"):
        assert errors[1][name] <= 1.1 * errors[0][name], (name, errors)


@pytest.mark.parametrize("token", first([20, 1, 36], 1, 1))
@pytest.mark.parametrize("ranks", first([3, 8, 1, 2, 4], 2))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_future_tokens_change_nothing_on_any_rank(gloo, layout, ranks, token):
    case = Case(layout, ranks=ranks)
    check_future_unseen(run(gloo, case), run(gloo, case.with_other_future(token)), token, case.length)


@pytest.mark.parametrize("case", one_of_each(4, COMBINATIONS), ids=str)
def test_any_two_features_together_are_exact(gloo, case):
    check(case, run(gloo, case))


@pytest.mark.parametrize("case", TREES, ids=str)
def test_key_extents_are_exact(gloo, case):
    check(case, run(gloo, replace(case, poison=True)))


@pytest.mark.parametrize("case", EVERYTHING, ids=lambda case: case.layout)
def test_every_feature_at_once_is_exact(gloo, case):
    check(case, run(gloo, case))


def test_random_problems_are_exact(gloo):
    fuzz(partial(run_or_restart, gloo), 15)


@pytest.mark.parametrize("case", first(WITH_BLANKS, 6, 12), ids=str)
def test_nan_that_nobody_may_see_changes_no_bit(gloo, case):
    check_same(run(gloo, replace(case, poison=True)), run(gloo, case))


def test_nan_in_dlse_of_a_query_that_sees_no_key_reaches_the_sinks_alone(gloo):
    check_sinks_alone(run(gloo, SINKS_ALONE), run(gloo, with_nan_in_dlse(SINKS_ALONE)))


@pytest.mark.pairs
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout_keeps_the_same_set_on_every_ring(gloo, layout, ranks):
    case = one_hot(Case(layout, full(), ranks, v_dim=37, dropout_rate=0.3))
    check_kept(case, run(gloo, case).out)


@pytest.mark.parametrize("seed", [0, 2**40 + 3, -1, -(2**63)])
def test_a_seed_may_be_any_int64_and_a_tensor(seed):
    q = torch.randn(1, 6, 2, 4)
    dropped = [ring_attention(q, q, q, dropout_rate=0.5, dropout_seed=x) for x in (seed, torch.tensor(seed))]
    assert torch.equal(*dropped)
    case = one_hot(Case(mask=full(), ranks=1, v_dim=37, dropout_rate=0.3, seed=seed))
    q, k, v = (torch.from_numpy(case.arrays[name]) for name in "qkv")
    out = ring_attention(q, k, v, mask=full(), layout="striped", dropout_rate=0.3, dropout_seed=torch.tensor(seed))
    check_kept(case, out.numpy())


@pytest.mark.parametrize("offset", [(WORD, WORD), (WORD - 1, 0)])
def test_batch_rows_and_heads_are_counted_modulo_2_to_the_32(offset):
    draw = dropout.dropout_state(dropout.Dropout(5, offset), torch.device("cpu"))
    positions = torch.arange(40)
    got = dropout.keep_mask(dropout.philox_keys(draw, 3, 2), 0.3, positions, positions)
    np.testing.assert_array_equal(got, keep_mask(5, 0.3, 3, 2, np.arange(40), np.arange(40), offset))


def test_dropout_offset_is_the_global_index_of_the_first_batch_row_and_head():
    case = one_hot(Case(mask=full(), kv_heads=4, v_dim=37, dropout_rate=0.3, batch=3))
    q, k, v = (torch.from_numpy(case.arrays[name]) for name in "qkv")
    call = partial(ring_attention, mask=full(), layout="striped", dropout_rate=0.3, dropout_seed=case.seed)
    part = [x[1:, :, 2:] for x in (q, k, v)]
    for offset in ((1, 2), (torch.tensor(1), torch.tensor(2))):
        assert torch.equal(call(*part, dropout_offset=offset) > 0, call(q, k, v)[1:, :, 2:] > 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_documents_are_the_documents_one_by_one(gloo, layout):
    check_documents(lambda case: run(gloo, case), packed(Case(layout, length=61)))


@pytest.mark.parametrize("layout", first(LAYOUTS, 1, 2))
def test_a_window_is_exact_at_every_offset_from_0_to_2_shards(gloo, layout):
    for offset in range(17):
        for mask in (sliding_window(3, offset=offset), sliding_window(0, 2, offset=-offset)):
            case = Case(layout, mask, ranks=3, length=24)
            check(case, run(gloo, case))
