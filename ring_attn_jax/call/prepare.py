"""Conversion of a user's arguments into a checked Problem with its plan, score and backend.

All ranks of a process run one traced program, so they cannot disagree about the arguments. Ranks of different processes can
disagree, and a call does not compare their arguments: users call ``check_ranks`` of ``training/ranks.py`` for that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax

from ring_attn_core.kernels.backends import PASSES, runnable
from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.problem.checks import OptionalArray
from ring_attn_core.problem.options import Options
from ring_attn_core.problem.problem import Problem
from ring_attn_core.releases import warn_if_untried

from ..attend.backend import Backend
from ..attend.blockwise import Blockwise
from ..attend.dropout import DropoutState
from ..attend.kernels import Kernels
from ..attend.keys import Keys, pack
from ..attend.launch import capability, makes_descriptors
from ..attend.one_run import TracedRuns
from ..attend.score import Score
from ..axes import described, dtype_names
from ..ring.step import Ring


class Arrays(NamedTuple):
    """The optional arrays of a call, or their gradients, named like the public arguments; callers pass them by position.

    ``dropout_seed``: the state made from public seed and offset. ``positions``, not public: those of a traced layout.
    """

    extents: jax.Array | None = None
    key_mask: jax.Array | None = None
    sinks: jax.Array | None = None
    alibi_slopes: jax.Array | None = None
    dropout_seed: DropoutState | None = None
    key_extents: jax.Array | None = None
    positions: jax.Array | None = None


def problem_of(q: Any, k: Any, v: Any, arrays: Arrays, ranks: int, options: Options) -> Problem:
    """Describe the call as plain data, without array values."""
    dtypes = dtype_names(q, k, v)
    of_seed = () if arrays.dropout_seed is None else (OptionalArray("dropout_seed", (), "uint32"),)
    return Problem(
        q.shape,
        k.shape,
        v.shape,
        dtypes,
        jax.default_backend(),
        ranks,
        options,
        described(arrays._replace(dropout_seed=None, positions=None)._asdict()) + of_seed,
        capability(),
        tma=makes_descriptors(),
        traced_layout=arrays.positions is not None,
    )


class CompiledCall(NamedTuple):
    """A problem that passed all checks, with its plan, backend and strategy. ``score`` holds numbers only, no arrays."""

    plan: RingPlan
    score: Score
    backend: Backend
    strategy: str
    steps: RingPlan
    """The plan by which the strategy moves keys: ``plan`` itself, or for example a plan over shards that the strategy joins."""
    values_in_keys: tuple[Problem, bool] | None = None
    """If the values are columns of k: the arguments of ``checked`` for the call with v as an array of its own; else None."""

    @property
    def of_backward(self) -> CompiledCall:
        """Return the call for the backward, which needs v as an array separate from k."""
        if self.values_in_keys is None:
            return self
        problem, anywhere = self.values_in_keys
        return checked(problem, anywhere=anywhere)

    @property
    def recorded(self) -> CompiledCall:
        """Return the call to run for a forward that a backward follows: a backend named by the user runs both."""
        automatic = self.values_in_keys is None or self.values_in_keys[0].options.backend == "auto"
        return self if automatic else self.of_backward

    def keys(self, k: jax.Array, v: jax.Array, arrays: Arrays) -> Keys:
        """Pack k, v, the key mask and the key extents into ``Keys``, the form in which they travel between ranks."""
        two_arrays, of_v = self.backend.two_arrays and not self.plan.travels, None if self.values_in_keys else v
        return pack(k, of_v, arrays.key_mask, arrays.key_extents, two_arrays=two_arrays)

    def scored(self, arrays: Arrays) -> Score:
        """Return the score parameters with this call's extents, sinks, ALiBi slopes, dropout state and traced positions."""
        return replace(
            self.score,
            extents=arrays.extents,
            sinks=arrays.sinks,
            alibi_slopes=arrays.alibi_slopes,
            dropout_seed=arrays.dropout_seed,
            positions=arrays.positions,
        )

    def ring(self, axis_name: str) -> Ring:
        """Return the ring over the mesh axis ``axis_name``, with this call's strategy and its plan ``steps``."""
        return Ring(self.steps, axis_name, self.strategy)


def checked(problem: Problem, *, anywhere: bool) -> CompiledCall:
    """Check a problem, choose its backend, and compile its kernels if the backend has any.

    ``anywhere``: True if the caller chooses the position at which a run begins, as in ``attend_block``; False if the plan does.
    """
    warn_if_untried("jax")
    plan, options = problem.check(), problem.options
    cap = None if options.softcap is None else float(options.softcap)
    call = runnable(problem, anywhere, PASSES[:1] if options.values_in_keys else PASSES)
    even, score = isinstance(plan.layout, str), Score(problem.scale, cap, float(options.dropout_rate))
    backend: Any = Blockwise(even, options.v_dim) if call is None else Kernels(call, plan.band_of_one_run)
    backend = TracedRuns(backend) if problem.traced_layout else backend
    ordinary = (problem.ordinary, anywhere) if options.values_in_keys else None
    return CompiledCall(plan, score, backend, problem.strategy, problem.steps, ordinary)
