"""Large and nearly equal scores: the JAX ring is as exact as one rank, because the state has the rest of a rounded lse."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ring_attn_core import full
from ring_attn_core.reference.oracle import Attention
from ring_attn_jax import attend_block, ring_attention
from ring_attn_jax.call.autograd import LSE_NAME, OUT_NAME

from ..support.cases import Case
from ..support.large_scores import CLOSE, SIZES, check_exact, check_no_ring_adds_errors, features_of, large
from ..support.selection import first, one_of_each
from ..support.strategies import STRATEGIES
from . import ring
from .ring import SEQ, mesh_of


def run(case: Case) -> Attention:
    return ring.run.__wrapped__(case)  # its cache does not see arrays


@pytest.mark.slow
@pytest.mark.parametrize("spread", [False, True], ids=["equal", "spread"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("ranks", first([((1, 4),), ((1, 2, 8),)]), ids=str)
def test_a_ring_is_as_exact_as_one_rank(size, spread, ranks):
    check_no_ring_adds_errors([check_exact(case, run(case)) for case in (large(size, n, spread) for n in ranks)], ranks)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("strategy", one_of_each(6, STRATEGIES.values()), ids=STRATEGIES)
def test_every_strategy_is_as_exact(strategy):
    case = large(1e6, 4, True, strategy=strategy, layout="striped")
    check_exact(case, run(case))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_masks_sinks_and_dropout_are_as_exact(size):
    case = features_of(size, 2)
    check_exact(case, run(case))


@pytest.mark.exhaustive
def test_float64_is_as_exact():
    case = large(1e6, 4, True, dtype="float64")
    check_exact(case, run(case))


def inputs(case: Case) -> list[jax.Array]:
    return [jnp.asarray(case.arrays[name]) for name in ("q", "k", "v", "dout")]


def test_a_policy_that_saves_out_and_lse_runs_no_second_ring():
    """It saves the rest of lse too, under the name of lse."""
    case = large(1e6, 2)
    attend = lambda q, k, v: ring_attention(q, k, v, layout="contiguous", mask=full(), scale=1.0)
    sharded = jax.shard_map(attend, mesh=mesh_of(2), in_specs=(SEQ, SEQ, SEQ), out_specs=SEQ)
    policy = jax.checkpoint_policies.save_only_these_names(OUT_NAME, LSE_NAME)
    *qkv, dout = inputs(case)
    sends = lambda f: str(jax.make_jaxpr(lambda *x: jax.vjp(f, *x)[1](dout))(*qkv)).count("ppermute")
    assert sends(jax.checkpoint(sharded, policy=policy)) == sends(sharded)


@pytest.mark.exhaustive
def test_the_gradients_of_a_block_are_as_exact():
    case = large(1e6, 1, True)
    *qkv, dout = inputs(case)
    _, vjp = jax.vjp(lambda q, k, v: attend_block(q, k, v, mask=full(), scale=1.0)[0], *qkv)
    truth = large(1e6, 1, True).given(**case.arrays | {"dlse": np.zeros_like(case.arrays["dlse"])}).expected
    for got, exact in zip(vjp(dout), (truth.dq, truth.dk, truth.dv), strict=True):
        assert np.linalg.norm(got - exact) <= CLOSE["float32"] * np.linalg.norm(exact)
