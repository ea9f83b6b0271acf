"""Large and nearly equal scores: a ring is as exact as one rank, because the state has the rest of a rounded lse."""

from __future__ import annotations

import numpy as np
import pytest

from ring_attn_core import full

from ..support.large_scores import CLOSE, SIZES, check_exact, check_no_ring_adds_errors, features_of, large
from ..support.selection import first, in_each
from ..support.strategies import STRATEGIES


@in_each("ranks", jax=first([((1, 4),), ((1, 2, 8),)]), torch=[((1, 2, 4, 8),)], slow="jax")
@pytest.mark.parametrize("spread", [False, True], ids=["equal", "spread"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_a_ring_is_as_exact_as_one_rank(framework, size, spread, ranks):
    cases = [large(size, n, spread) for n in ranks]
    check_no_ring_adds_errors([check_exact(case, framework.attention(case, anew=True)) for case in cases], ranks)


EACH = [large(1e6, 4, True, strategy=strategy, layout="striped") for strategy in STRATEGIES.values()]
FEATURES = [features_of(size, 4) for size in SIZES.values()]
FLOAT64 = large(1e6, 4, True, dtype="float64")


@in_each("case", jax=first([FLOAT64, *FEATURES, EACH[0]], 0), torch=[FLOAT64, *FEATURES, *EACH], slow="jax")
def test_every_strategy_masks_sinks_dropout_and_float64_are_as_exact(framework, case):
    check_exact(case, framework.attention(case, anew=True))


@in_each("dtype", jax=first(["float32"], 0), torch=["float32"])
def test_the_gradients_of_a_block_are_as_exact(framework, dtype):
    case = large(1e6, 1, True)
    call = lambda q, k, v: framework.attend_block(q, k, v, mask=full(), scale=1.0)[0]
    _, gradients = framework.pull(call, [case.arrays[name] for name in "qkv"], [case.arrays["dout"]])
    truth = large(1e6, 1, True).given(**case.arrays | {"dlse": np.zeros_like(case.arrays["dlse"])}).expected
    for got, exact in zip(gradients, (truth.dq, truth.dk, truth.dv), strict=True):
        assert np.linalg.norm(got - exact) <= CLOSE[dtype] * np.linalg.norm(exact)
