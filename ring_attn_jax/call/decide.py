"""The decision on a call: the plan, strategy and backend by which all ranks of a ring run a problem.

All ranks of a process run one traced program, so they cannot disagree about the arguments, and ``decide`` exchanges nothing.
Ranks of different processes can disagree, and a call does not compare their arguments: users call ``check_ranks`` of
``training/ranks.py`` for that. ``Decision`` and ``compile_call`` have the same source text as those of ``ring_attn_torch``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

from ring_attn_core.kernels.backends import PASSES, begin_backward, runnable
from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.problem.problem import Problem
from ring_attn_core.releases import warn_if_untried

from ..attend.backend import Backend
from ..attend.blockwise import Blockwise
from ..attend.kernels import Kernels
from ..attend.keys import Keys, pack
from ..attend.one_run import TracedRuns
from ..attend.score import Score
from ..ring.step import Ring
from .prepare import Arrays


@dataclass(frozen=True)
class Decision:
    """A checked problem, and what runs it on all ranks of a ring. ``steps``: the plan by which the strategy moves keys,
    such as the problem's or a plan over joined shards. ``any_position``: the caller chooses where runs begin, not the plan.
    ``ahead``: the compilation of the backward has begun."""

    problem: Problem
    steps: RingPlan
    backend: Backend
    any_position: bool = False
    ahead: bool = False

    @cached_property
    def backward(self) -> Decision:
        """Compile the backward, which reads v as an array of its own, and return the decision on it."""
        options = self.problem.options
        if options.backend != "auto" and options.v_dim is None:
            return self
        return _decision(self.problem.ordinary, self.any_position, PASSES[1:] if options.backend == "auto" else PASSES)

    def pack_keys(self, k: Any, v: Any, arrays: Arrays) -> Keys:
        """Pack k, v, the key mask and the key extents into ``Keys``, the form in which they travel between ranks."""
        two_arrays, v = self.backend.two_arrays and not self.steps.travels, v if self.problem.options.v_dim is None else None
        return pack(k, v, arrays.key_mask, arrays.key_extents, two_arrays=two_arrays)

    def score_with(self, arrays: Arrays) -> Score:
        """Return the parameters of the score, with this call's arrays that belong to the queries."""
        options = self.problem.options
        numbers = self.problem.scale, options.softcap, options.dropout_rate
        return Score(*numbers, arrays.extents, arrays.sinks, arrays.alibi_slopes, arrays.dropout_seed, arrays.positions)

    def ring(self, axis_name: str) -> Ring:
        """Return the ring by which the strategy moves keys."""
        return Ring(self.steps, axis_name, self.problem.strategy)


def compile_call(problem: Problem, *, any_position: bool, ahead: bool = False) -> Decision:
    """Check the problem and compile its forward. ``ahead``: first begin to compile the backward that "auto" selects."""
    problem.check()
    forward_only = problem.options.backend == "auto" or problem.options.values_in_keys
    if ahead:
        if problem.options.backend == "auto":
            begin_backward(problem.ordinary, any_position)
        return replace(compile_call(problem, any_position=any_position, ahead=False), ahead=True)
    return _decision(problem, any_position, PASSES[:1] if forward_only else PASSES)


def _decision(problem: Problem, any_position: bool, passes: Collection[str]) -> Decision:
    return Decision(problem, problem.steps, _backend(problem, any_position, passes), any_position)


def _backend(problem: Problem, any_position: bool, passes: Collection[str]) -> Backend:
    warn_if_untried("jax")
    call = runnable(problem, any_position, passes)
    even = isinstance(problem.plan.layout, str) or problem.options.order == "global"
    backend: Any = Blockwise(even, problem.options.v_dim) if call is None else Kernels(call, problem.steps.band_of_one_run)
    return cast(Backend, TracedRuns(backend)) if problem.traced_layout else backend


def decide(problem: Problem) -> Decision:
    """Return the decision on a call, the same on every rank of a program."""
    return compile_call(problem, any_position=False, ahead=True)
