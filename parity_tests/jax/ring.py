"""Runs a case of parity_tests/support/cases.py on the JAX ring."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.reference.oracle import Attention
from ring_attn_jax import ring_attention
from ring_attn_jax.attend import tiles

from ..support.cases import PADDING, Case

SEQ = PartitionSpec(None, "seq")
REPLICATED = PartitionSpec()


def mesh_of(ranks: int) -> Mesh:
    return jax.make_mesh((ranks,), ("seq",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ranks])


def options(plan: RingPlan) -> dict:
    return {"layout": plan.layout, "mask": plan.mask, "length": plan.length, "kv_length": plan.kv_length}


QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
if jax.__version_info__ < (0, 11):  # newer ones have no such option
    QUICK |= {"xla_cpu_use_fusion_emitters": False}
"""Options for a program that hardly runs: compiled in half the time, of which the last one is a fifth."""

AS_USERS = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
"""XLA's own, for parity_tests/conftest.py asks for less."""


def run_once(case: Case) -> Attention:
    """``run`` for a case that does not come again: nothing is kept (programs are 20 MB each)."""
    try:
        return run.__wrapped__(case)
    finally:
        program.cache_clear()
        jax.clear_caches()


@lru_cache(maxsize=2048)
def run(case: Case, quick: bool = True) -> Attention:
    """out, lse, dq, dk, dv as whole arrays in natural order, padding included, and dsinks; not ``quick``: compiled as users'."""
    q, k, v, dout, dlse, *features = whole(case)
    with jax.enable_x64(case.dtype == "float64"), patch_tiles(case):
        arrays = [jnp.asarray(x, case.dtype) for x in (q, k, v, dout)]
        arguments = {name: jnp.asarray(x) for name, x in zip(case.features, features, strict=True)}
        results = program(replace(case, poison=False), quick)(*arrays, jnp.asarray(dlse), arguments)
        wide = [np.asarray(x.astype(jnp.float64 if case.dtype == "float64" else jnp.float32)) for x in results]
    arrays = "qqqk" if case.values_in_keys else "qqqkk"
    *sharded, dsinks = [*wide, None][: len(arrays) + 1]
    gathered = [case.gather(np.split(x, case.ranks, 1), of) for x, of in zip(sharded, arrays, strict=True)]
    return Attention(*[*gathered, None][:5], dsinks=dsinks)


@lru_cache(maxsize=2048)
def program(case: Case, quick: bool) -> Callable:
    """Return a function of arrays in layout order, compiled once for every case: out, lse, dq, dk, dv and dsinks of any sinks."""

    def attention(q, k, v, sinks, features):
        call = options(case.plan) | case.scalars | features | {"strategy": case.strategy, "order": case.order} | case.v_dims
        v = None if case.values_in_keys else v
        return ring_attention(q, k, v, **call, sinks=sinks, return_lse=True)

    def results(q, k, v, dout, dlse, features):
        sinks = features.get("sinks")
        others = {name: x for name, x in features.items() if name != "sinks"}
        specs = SEQ, SEQ, SEQ, REPLICATED, {name: SEQ if name in PADDING else REPLICATED for name in others}
        sharded = jax.shard_map(attention, mesh=mesh_of(case.ranks), in_specs=specs, out_specs=(SEQ, SEQ))
        primal, vjp = jax.vjp(lambda q, k, v, sinks: sharded(q, k, v, sinks, others), q, k, v, sinks)
        dq, dk, dv, dsinks = vjp((dout, dlse))
        return *primal, *(x for x in (dq, dk, None if case.values_in_keys else dv, dsinks) if x is not None)

    return jax.jit(results, compiler_options=(QUICK if quick else AS_USERS) if jax.default_backend() == "cpu" else None)


def whole(case: Case) -> list[np.ndarray]:
    """Return the arrays of ``case.inputs``, sharded ones whole in layout order."""
    inputs = dict(zip((*case.arrays, *case.features), case.inputs(), strict=True))
    return [np.concatenate(x, 1) if name in case.arrays or name in PADDING else x[0] for name, x in inputs.items()]


def patch_tiles(case: Case):
    small = case.tiles
    choose = (lambda rows, q, k: (min(small[0], q), min(small[1], k))) if small else tiles.blockwise_tiles
    return patch.object(tiles, "blockwise_tiles", choose)


def hops_tied_to_steps(text: str, others: int) -> tuple[list[tuple[str, str]], dict[str, list[str]]]:
    """Assert that each barrier of the gradients on 8 ranks, lowered to ``text``, ties one hop to more than ``others`` values.

    Return the permutes as (result, operand), and the operands of each barrier by its result.
    """
    permutes = re.findall(r'(%\w+) = "stablehlo.collective_permute"\((%\w+)', text)
    ties = {made: re.findall(r"%\w+", of) for made, of in re.findall(r"(%\w+):\d+ = stablehlo.optimization_barrier (.*) :", text)}
    assert len(permutes) == 7 + 7 + 7
    assert len(ties) == 2 * 7
    results = [made for made, _ in permutes]
    for operands in ties.values():
        assert sum(operand in results for operand in operands) == 1
        assert len(operands) > others
    return permutes, ties
