"""From the arguments of a user to a checked Problem with its plan, score and backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
from jax import lax

from ring_attn_core.kernels.backends import runnable
from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.problem.checks import OptionalArray
from ring_attn_core.problem.options import Options
from ring_attn_core.problem.problem import Problem
from ring_attn_core.problem.strategies import chosen
from ring_attn_core.releases import warn_if_untried

from ..attend.backend import Backend
from ..attend.blockwise import Blockwise
from ..attend.dropout import Draw
from ..attend.kernels import Kernels
from ..attend.launch import capability, makes_descriptors
from ..attend.score import Score
from ..axes import described, dtype_names
from ..ring.step import Ring


class Arrays(NamedTuple):
    """The optional arrays of a call under their public names, None if not passed.

    ``dropout_seed``: the dropout state, made from the public ``dropout_seed`` and ``dropout_offset``.
    """

    extents: jax.Array | None = None
    key_mask: jax.Array | None = None
    sinks: jax.Array | None = None
    alibi_slopes: jax.Array | None = None
    dropout_seed: Draw | None = None
    key_extents: jax.Array | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The arrays that were passed, by name."""
        return {name: x for name, x in zip(self._fields, self, strict=True) if x is not None}


def problem_of(q: Any, k: Any, v: Any, arrays: Arrays, ranks: int, options: Options) -> Problem:
    """Return the call as plain data. Raise ValueError if an argument is not an array."""
    given = arrays.given
    of_seed = (OptionalArray("dropout_seed", (), "uint32"),) if given.pop("dropout_seed", None) is not None else ()
    return Problem(
        q.shape,
        k.shape,
        v.shape,
        dtype_names(q, k, v),
        jax.default_backend(),
        ranks,
        options,
        described(given) + of_seed,
        capability(),
        tma=makes_descriptors(),
    )


class CompiledCall(NamedTuple):
    """A problem that passed all checks: its plan, its score without arrays, its backend and its strategy."""

    plan: RingPlan
    score: Score
    backend: Backend
    strategy: str

    def scored(self, arrays: Arrays) -> Score:
        """Return the score with the arrays that stay with the queries."""
        given = {name: x for name, x in arrays.given.items() if name not in ("key_mask", "key_extents")}
        if arrays.alibi_slopes is not None:
            given["alibi_slopes"] = lax.stop_gradient(arrays.alibi_slopes)
        return replace(self.score, **given)

    def ring(self, axis_name: str) -> Ring:
        """Return the ring over that mesh axis."""
        return Ring(self.plan, axis_name, self.strategy)


def checked(problem: Problem, *, anywhere: bool) -> CompiledCall:
    """Check a problem, choose its backend, and compile its kernels.

    ``anywhere``: the problem is a block at arbitrary positions instead of those of the plan.
    """
    warn_if_untried("jax")
    plan, options = problem.check(), problem.options
    cap = None if options.softcap is None else float(options.softcap)
    call = runnable(problem, anywhere)
    backend = Blockwise() if call is None else Kernels(call, problem.blanks or anywhere)
    return CompiledCall(plan, Score(problem.scale, cap, float(options.dropout_rate)), backend, chosen(options.strategy))
