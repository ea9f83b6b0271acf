"""The JAX ring against float64: out, lse and every gradient within the computed bound."""

from __future__ import annotations

import pytest

from parity_tests.cases import SPECIAL, Case, check, check_future_unseen, grid, pairs
from parity_tests.jax.ring import run
from ring_attn_core import LAYOUTS

CHOSEN = [Case(), *pairs(grid())]
REST = [case for case in grid() if case not in CHOSEN]


@pytest.mark.parametrize("case", CHOSEN, ids=str)
def test_out_lse_and_gradients_are_exact(case):
    check(case, run(case))


@pytest.mark.full
@pytest.mark.parametrize("case", REST, ids=str)
def test_the_rest_of_the_grid_is_exact(case):
    check(case, run(case))


@pytest.mark.parametrize("case", SPECIAL, ids=str)
def test_cross_attention_padding_and_odd_sizes_are_exact(case):
    check(case, run(case))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_error_does_not_grow_with_the_ring(dtype):
    """As it would if the state were rounded to the inputs' dtype at each hop."""
    errors = [check(case, run(case)) for case in (Case(ranks=ranks, dtype=dtype, length=48) for ranks in (1, 8))]
    for name in ("out", "dq", "dk", "dv"):
        assert errors[1][name] <= 1.1 * errors[0][name], (name, errors)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_future_tokens_change_nothing_on_any_rank(layout):
    case = Case(layout)
    check_future_unseen(run(case), run.__wrapped__(case.with_other_future(20)), 20, case.length)
