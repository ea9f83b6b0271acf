"""The PyTorch ring against float64: out, lse and every gradient within the computed bound, on gloo."""

from __future__ import annotations

import pytest

from parity_tests.cases import MASKS, RANKS, SPECIAL, Case, check, check_future_unseen, grid
from parity_tests.torch.ring import run
from ring_attn_core import LAYOUTS


@pytest.mark.parametrize("case", grid(), ids=str)
def test_out_lse_and_gradients_are_exact(gloo, case):
    check(case, run(gloo, case))


@pytest.mark.parametrize("case", SPECIAL, ids=str)
def test_cross_attention_padding_and_odd_sizes_are_exact(gloo, case):
    check(case, run(gloo, case))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_precision_error_does_not_grow_with_the_ring(gloo, layout, mask, dtype):
    """As it would if the state were rounded to the inputs' dtype at each hop."""
    errors = [check(case, run(gloo, case)) for case in (Case(layout, mask, ranks, dtype=dtype, length=48) for ranks in (1, 8))]
    for name in ("out", "dq", "dk", "dv"):
        assert errors[1][name] <= 1.1 * errors[0][name], (name, errors)


@pytest.mark.parametrize("token", [1, 20, 36])
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_future_tokens_change_nothing_on_any_rank(gloo, layout, ranks, token):
    case = Case(layout, ranks=ranks)
    check_future_unseen(run(gloo, case), run(gloo, case.with_other_future(token)), token, case.length)
