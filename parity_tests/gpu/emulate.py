"""Rings of any size on one GPU, rank by rank without communication, in both frameworks: what every rank would have launched."""

# pyright: reportOptionalSubscript=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.problem.options import Options
from ring_attn_core.reference.oracle import Attention, rounding
from ring_attn_jax.attend import keys as jax_keys
from ring_attn_jax.attend.dropout import dropout_state as jax_dropout_state
from ring_attn_jax.call import prepare as jax_prepare
from ring_attn_jax.call.decide import decide as jax_decide
from ring_attn_torch.attend import keys as torch_keys
from ring_attn_torch.attend.dropout import Dropout
from ring_attn_torch.attend.dropout import dropout_state as torch_dropout_state
from ring_attn_torch.call import prepare as torch_prepare
from ring_attn_torch.call.decide import compile_call as torch_compile

from ..support.cases import Case


def on_torch(case: Case, backend: str = "triton") -> Attention:
    """out, lse, dq, dk, dv, dsinks as whole float32 arrays in natural order, padding included."""
    dtype = getattr(torch, case.dtype)
    q, k, v, dout, *_ = [[torch.from_numpy(x).to("cuda", dtype) for x in shards] for shards in case.inputs()[:4]]
    dlse, *features = [[torch.from_numpy(x).cuda() for x in shards] for shards in case.inputs()[4:]]
    of_rank = [
        dict(zip(case.features, each, strict=True)) for each in (zip(*features, strict=True) if features else [()] * len(q))
    ]
    scores, backends = zip(*(_torch_score(case, backend, q[0], k[0], v[0], arrays) for arrays in of_rank), strict=True)
    two_arrays = backends[0][1].two_arrays and not case.plan.hops

    def make_keys(r: int, forward: bool) -> torch_keys.Keys:
        of_v = None if forward and case.values_in_keys else v[r]
        return torch_keys.pack(k[r], of_v, of_rank[r].get("key_mask"), of_rank[r].get("key_extents"), two_arrays)

    results = _ring(case.plan, scores, q, make_keys, dout, dlse, backends[0], case.plan.rows)
    wide = [[x.float().cpu().numpy() for x in each] for each in results[:-1]]
    return _gathered(case, wide, [np.zeros(1) if x is None else x.float().cpu().numpy() for x in results[-1]])


def _torch_score(case: Case, backend: str, q: Any, k: Any, v: Any, arrays: dict[str, Any]) -> Any:
    seed = case.scalars["dropout_seed"]
    draw = None if seed is None else torch_dropout_state(Dropout(seed), torch.device("cuda"))
    given = torch_prepare.Arrays(**arrays, dropout_seed=draw)
    problem = torch_prepare.problem_of(q, k, v, given, case.plan.ranks, _options(case, backend))
    decision = torch_compile(problem, any_position=False)
    return decision.score_with(given), (decision.backend, decision.backward.backend)


def _options(case: Case, backend: str) -> Options:
    plan, of_v = case.plan, case.v_dims.get("v_dim")
    return Options(
        layout=plan.layout,
        mask=plan.mask,
        length=plan.length,
        kv_length=plan.kv_length,
        scale=case.scale,
        softcap=case.softcap,
        dropout_rate=case.dropout_rate,
        backend=backend,
        v_dim=of_v,
    )


def on_jax(case: Case, backend: str = "triton") -> Attention:
    """The same from JAX, in one jitted program."""
    shards = case.inputs()
    arrays = [[jnp.asarray(x, case.dtype) for x in each] for each in shards[:4]]
    dlse, *features = [[jnp.asarray(x) for x in each] for each in shards[4:]]
    results = jax.jit(lambda *a: _jax_ring(case, backend, *a))(*arrays, dlse, features)
    wide = [[np.asarray(x.astype(jnp.float32)) for x in each] for each in results[:-1]]
    return _gathered(case, wide, [np.zeros(1) if x is None else np.asarray(x, np.float32) for x in results[-1]])


def _jax_ring(case: Case, backend: str, q: Any, k: Any, v: Any, dout: Any, dlse: Any, features: Any) -> Any:
    plan = case.plan
    of_rank = [
        dict(zip(case.features, each, strict=True)) for each in (zip(*features, strict=True) if features else [()] * len(q))
    ]
    seed = case.scalars["dropout_seed"]
    draw = None if seed is None else jax_dropout_state(seed, (0, 0))
    given = [jax_prepare.Arrays(**arrays, dropout_seed=draw) for arrays in of_rank]
    problem = jax_prepare.problem_of(q[0], k[0], v[0], given[0], plan.ranks, _options(case, backend))
    decision = jax_decide(problem)
    scores, backends = [decision.score_with(arrays) for arrays in given], (decision.backend, decision.backward.backend)
    two_arrays = backends[1].two_arrays and not plan.hops

    def make_keys(r: int, forward: bool) -> jax_keys.Keys:
        of_v = None if forward and case.values_in_keys else v[r]
        return jax_keys.pack(k[r], of_v, given[r].key_mask, given[r].key_extents, two_arrays)

    rows = lambda rank, shift: jnp.asarray(plan.rows(rank, shift), jnp.int32)
    return _ring(plan, scores, q, make_keys, dout, dlse, backends, rows)


def _ring(
    plan: RingPlan, scores: Any, q: Any, make_keys: Callable[[int, bool], Any], dout: Any, dlse: Any, backends: Any, rows: Any
) -> tuple[list[Any], ...]:
    """out, lse, dq, dk, dv and dsinks of every rank: the loop of ring/loop.py, its ranks one after the other at every shift.

    ``make_keys(rank, forward)``, ``backends``: for the forward and for the backward.
    """
    every, (backend, of_backward) = range(plan.ranks), backends
    keys, total, dq, dkv = [make_keys(r, True) for r in every], [None] * plan.ranks, [None] * plan.ranks, [None] * plan.ranks
    for shift in plan.shifts:
        last = shift == plan.shifts[-1]
        for r in every:
            total[r] = backend.attend(q[r], keys[r - shift], rows(r, shift), scores[r], total[r], last)
    state: Any = type(total[0])
    out, lse, _ = zip(*total, strict=True)
    keys = [make_keys(r, False) for r in every]
    start = lambda r: of_backward.backward_inputs(q[r], keys[r], rows(r, 0), scores[r], total[r], state(dout[r], dlse[r]))
    of_q = [start(r) for r in every]
    for shift in plan.shifts:
        last = shift == plan.shifts[-1]
        for r in every:
            arrived = dkv[r - shift]
            arguments = of_q[r], keys[r - shift], rows(r, shift), scores[r], dq[r], lambda arrived=arrived: arrived, last
            dq[r], dkv[r - shift] = of_backward.attend_backward(*arguments)
    d = q[0].shape[-1]
    dk, dv = zip(*(x if isinstance(x, tuple) else (x[..., :d], x[..., d:]) for x in dkv), strict=True)  # type: ignore[index]
    return [*out], [*lse], dq, [*dk], [*dv], [each.sinks for each in of_q]


def _gathered(case: Case, sharded: list[list[np.ndarray]], dsinks: list[np.ndarray]) -> Attention:
    whole = [case.gather(x, of) for x, of in zip(sharded, "qqqkk", strict=True)]
    if case.values_in_keys:
        *others, dk, dv = whole
        sum_of_both = dk + np.pad(dv, [(0, 0)] * 3 + [(0, case.head_dim - case.v_dim)])
        whole = [*others, rounding(case.dtype)(sum_of_both), None]
    return Attention(*whole, dsinks=np.sum(dsinks, 0) if case.sinks else None)
