"""From what a user passes to a Problem, or a clear error."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax import lax

from ring_attn_core.kernels.backends import runnable
from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.problem.checks import Given
from ring_attn_core.problem.problem import Problem
from ring_attn_core.runs import Band

from .attend.backend import Backend
from .attend.blockwise import Blockwise
from .attend.dropout import Draw
from .attend.kernels import Kernels
from .attend.launch import capability, makes_descriptors
from .attend.score import Score
from .axes import described, dtype_names


class Prepared(NamedTuple):
    """A call that passed every check: its plan, its score, and who computes it."""

    plan: RingPlan
    score: Score
    backend: Backend


def checked(
    q: Any,
    k: Any,
    v: Any,
    arrays: dict[str, Any],
    draw: Draw | None,
    ranks: int,
    layout: str,
    mask: Band,
    length: int | None,
    kv_length: int | None,
    scale: float | None,
    softcap: float | None,
    dropout_rate: float,
    backend: str,
    anywhere: bool = False,
) -> Prepared:
    """What a call needs to run, once every check has passed. ``arrays``: the optional ones by name, None where not given.

    ``anywhere``: it is a block that may stand wherever it is told to, not where the plan has it.
    """
    dtypes = dtype_names(q, k, v)
    given = described(arrays) + (() if draw is None else (Given("dropout_seed", (), "uint32"),))
    problem = Problem(
        q.shape,
        k.shape,
        v.shape,
        dtypes,
        jax.default_backend(),
        ranks,
        layout,
        mask,
        length,
        kv_length,
        scale,
        softcap,
        dropout_rate,
        given,
        backend,
        capability(),
        tma=makes_descriptors(),
    )
    plan = problem.check()
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    cap = None if softcap is None else float(softcap)
    slopes = arrays["alibi_slopes"]
    slopes = None if slopes is None else lax.stop_gradient(slopes)
    extents, sinks = arrays["extents"], arrays.get("sinks")
    draw = draw if q.size else None  # of nothing nothing is dropped; XLA fails on a shard_map that uses only empty arrays
    call = runnable(problem, anywhere)
    backend_ = Blockwise() if call is None else Kernels(call, problem.blanks or anywhere)
    return Prepared(plan, Score(factor, cap, float(dropout_rate), extents, sinks, slopes, draw), backend_)
