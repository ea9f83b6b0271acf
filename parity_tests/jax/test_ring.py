"""The JAX ring against float64: out, lse and every gradient within the computed bound."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from ring_attn_core import LAYOUTS, full, sliding_window
from ring_attn_core.dropout import WORD, keep_mask
from ring_attn_jax import sharded_ring_attention
from ring_attn_jax.attend import dropout

from ..fuzz import fuzz
from ..support.cases import CHOSEN, REST, SPECIAL, Case, check, check_future_unseen, check_kept, check_same, one_hot
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
from ..support.selection import first, one_in
from .ring import mesh_of, options, run, run_once, whole


@pytest.mark.parametrize("case", first(CHOSEN, 2, 9), ids=str)
def test_out_lse_and_gradients_are_exact(case):
    check(case, run(case))


@pytest.mark.full
@pytest.mark.parametrize("case", REST, ids=str)
def test_the_rest_of_the_grid_is_exact(case):
    check(case, run(case))


@pytest.mark.parametrize("case", one_in(2, SPECIAL), ids=str)
def test_cross_attention_padding_and_odd_sizes_are_exact(case):
    """Compiled as users compile; parity_tests/test_parity.py compares the same results."""
    check(case, run(case, quick=False))


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", first([2, 1]))
def test_a_key_that_outweighs_all_others_has_probability_1_to_the_last_bit(ranks):
    """However large the scores: lse is carried and comes back as it was rounded."""
    case = Case(ranks=ranks, scale=1e6)
    check(case, run(case))


IN_HALVES = [
    Case("striped", ranks=8, kv_heads=4, length=48, dtype="bfloat16"),
    Case("contiguous", full(), ranks=8, length=48, dtype="float16"),
]
"""Two of CHOSEN, which are compiled already."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", IN_HALVES, ids=lambda case: case.dtype)
def test_half_precision_error_does_not_grow_with_the_ring(case):
    """As it would if the state were rounded to the inputs' dtype at each hop."""
    errors = [check(each, run(each)) for each in (replace(case, ranks=1), case)]
    for name in ("out", "dq", "dk", "dv"):
        assert errors[1][name] <= 1.1 * errors[0][name], (name, errors)


@pytest.mark.parametrize("layout", first(dict.fromkeys(("zigzag", *LAYOUTS))))
def test_future_tokens_change_nothing_on_any_rank(layout):
    case = Case(layout)
    check_future_unseen(run(case), run.__wrapped__(case.with_other_future(20)), 20, case.length)


@pytest.mark.parametrize("case", first(COMBINATIONS, 0, 5), ids=str)
def test_any_two_features_together_are_exact(case):
    check(case, run(case))


@pytest.mark.parametrize("case", first(sorted(TREES, key=lambda case: (case.ranks != 3, case.ranks)), 1, 3), ids=str)
def test_key_extents_are_exact(case):
    check(case, run(replace(case, poison=True)))


@pytest.mark.parametrize("case", first(EVERYTHING[::-1], 1, 1), ids=lambda case: case.layout)
def test_every_feature_at_once_is_exact(case):
    check(case, run(case))


@pytest.mark.parametrize("case", first(WITH_BLANKS, 0, 5), ids=str)
def test_nan_that_nobody_may_see_changes_no_bit(case):
    """With the first of COMBINATIONS, which are compiled already."""
    check_same(run(replace(case, poison=True)), run(case))


def test_nan_in_dlse_of_a_query_that_sees_no_key_reaches_the_sinks_alone():
    check_sinks_alone(run(SINKS_ALONE), run.__wrapped__(with_nan_in_dlse(SINKS_ALONE)))


@pytest.mark.parametrize(("layout", "ranks"), first([("zigzag", 1), ("zigzag", 3), ("striped", 2), ("contiguous", 8)], 0, 3))
def test_dropout_keeps_the_same_set_on_every_ring(layout, ranks):
    case = one_hot(Case(layout, full(), ranks, v_dim=37, dropout_rate=0.3))
    check_kept(case, natural(case, dropped(case, mesh_of(ranks), case.seed)))


@pytest.mark.exhaustive
def test_dropout_keeps_the_same_set_where_batch_and_heads_are_sharded():
    case = one_hot(Case("zigzag", full(), 2, v_dim=37, dropout_rate=0.3))
    mesh = jax.make_mesh((2, 2, 2), ("data", "seq", "tensor"), axis_types=(AxisType.Auto,) * 3)
    check_kept(case, natural(case, dropped(case, mesh, case.seed, batch_axes="data", head_axis="tensor")))


@pytest.mark.parametrize("seed", first([2**40 + 3, -(2**63), 0, -1], 2))
def test_a_seed_may_be_any_int64(seed):
    case = one_hot(Case("striped", full(), 2, v_dim=37, dropout_rate=0.3, seed=seed))
    check_kept(case, natural(case, dropped(case, mesh_of(2), seed)))


@pytest.mark.parametrize("offset", [(WORD, WORD), (WORD - 1, 0)])
def test_batch_rows_and_heads_are_counted_modulo_2_to_the_32(offset):
    draw = dropout.dropout_state(5, offset)
    positions = jnp.arange(40)
    got = jax.jit(lambda: dropout.keep_mask(dropout.philox_keys(draw, 3, 2), 0.3, positions, positions))()
    np.testing.assert_array_equal(got, keep_mask(5, 0.3, 3, 2, np.arange(40), np.arange(40), offset))


def test_a_new_seed_each_step_compiles_nothing():
    case = one_hot(Case("striped", full(), 2, v_dim=37, dropout_rate=0.3))
    step = jax.jit(partial(dropped, case, mesh_of(2)))
    seeds = {seed: jnp.int32(seed) for seed in (0, 7, -1)}
    step(seeds[0])
    with jax.no_tracing():
        results = {seed: step(array) for seed, array in seeds.items()}
    for seed, out in results.items():
        check_kept(replace(case, seed=seed), natural(case, out))


def dropped(case, mesh, seed, **axes):
    """Only out, in layout order."""
    q, k, v = (jnp.asarray(x) for x in whole(case)[:3])
    dropout = {"dropout_rate": case.dropout_rate, "dropout_seed": seed}
    return sharded_ring_attention(q, k, v, mesh=mesh, **options(case.plan), **dropout, **axes)


def natural(case, out):
    return case.gather(np.split(np.asarray(out), case.ranks, 1))


@pytest.mark.full
def test_packed_documents_are_the_documents_one_by_one():
    check_documents(run.__wrapped__, packed(Case(length=61)))


@pytest.mark.parametrize(("layout", "offset"), first([("striped", 8), ("contiguous", 13), ("zigzag", 3), ("zigzag", 16)], 0, 1))
def test_a_window_is_exact_at_offsets_of_up_to_2_shards(layout, offset):
    case = Case(layout, sliding_window(3, 1, offset=offset), length=32)
    check(case, run(case))


@pytest.mark.parametrize("problems", first([2, 15], 0, 1, "campaign"))
def test_random_problems_are_exact(problems):
    fuzz(run_once, problems)
