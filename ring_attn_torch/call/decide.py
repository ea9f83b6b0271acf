"""The decision on a call: the plan, strategy and backend by which all ranks of a ring run a problem, equal on each of them.

The first call of a problem makes one exchange before any tensor is sent. A rank tells the others its error or the problem's
fingerprint, the GPUs whose memory it can copy, and what it found in its extents. A later call looks the decision up. It
exchanges only if it must read intervals: on a CPU in each call that has them, on GPUs for new extents if "auto" took "direct" in
a balanced layout. "auto" takes it only while the extents of all ranks stay within the layout's documents. Once some do not,
equal problems take the ring, in later calls and in the backward of earlier ones.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.distributed as dist

from ring_attn_core.data.layout_check import check_order, where_held
from ring_attn_core.kernels.backends import PASSES, VENDORS, begin_backward, runnable
from ring_attn_core.plan.needed import NeededPlan, check_available, unavailable
from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.problem.checks import check_extents, check_key_extents
from ring_attn_core.problem.problem import Problem
from ring_attn_core.records import MAX_KNOWN, add_newest
from ring_attn_core.releases import warn_if_untried

from ..attend.backend import Backend
from ..attend.blockwise import Blockwise
from ..attend.kernels import Kernels
from ..attend.keys import Keys, pack
from ..attend.recent import Unchanged
from ..attend.score import Score
from ..attend.vendor import Vendor
from ..ring.agreement import ALONE, History, exchange, record_of, same_error, timeout
from ..ring.groups import Group, capturing, rank_in
from ..ring.peer_access import Reach, can_share, check_access, reach
from ..ring.step import Ring
from .prepare import Arrays, check_served

COPYING = ("cuda",)
"""The device types whose memory other ranks may copy."""

EACH_TIME = ("cpu",)
"""The device types on which intervals are read at each call. On other devices reading waits for the device."""

MAX_READ = 32
"""The largest number of tensors of extents of a group that are remembered as read. A remembered tensor stays in memory."""


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
        return Score(*numbers, arrays.extents, arrays.sinks, arrays.alibi_slopes, arrays.dropout_seed)

    def ring(self, group: Group) -> Ring:
        """Return the ring by which the strategy moves keys."""
        return Ring(self.steps, group, self.problem.strategy)


@lru_cache(maxsize=MAX_KNOWN)
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
    warn_if_untried("torch", not dist.is_initialized() or dist.get_rank() == 0)
    call = runnable(problem, any_position, passes)
    if call is not None:
        return Kernels(call, problem.steps.band_of_one_run)
    v_dim = problem.options.v_dim
    return Vendor(problem.options.backend, v_dim=v_dim) if problem.options.backend in VENDORS else Blockwise(v_dim=v_dim)


def decide(problem: Problem, arrays: Arrays, group: Group, device: torch.device, *, ahead: bool = False) -> Decision:
    """Return the decision on a call, the same on every rank of ``group``. If a rank has an error or their calls differ, all raise
    the same error. ``ahead``: see ``compile_call``."""
    record = record_of(group, problem.device)
    intervals = arrays.extents is not None or arrays.key_extents is not None
    known: Decision | None = None if intervals or record.checked is not None else record.agreed.get(problem)
    if known is None:
        known = _compare(problem, arrays, group, device, ahead)
    else:
        record.calls += 1
    if ahead and not known.ahead:  # earlier equal calls had no backward
        known = compile_call(known.problem, any_position=False, ahead=True)
    return known


def decide_backward(problem: Problem, arrays: Arrays, group: Group) -> Decision:
    """Return the decision on the backward of a call. Exchange nothing."""
    record = record_of(group, problem.device)
    return (record.agreed.get(_decision_key(problem, arrays, record)) or compile_call(problem, any_position=False)).backward


def _compare(problem: Problem, arrays: Arrays, group: Group, device: torch.device, ahead: bool) -> Decision:
    """Make the exchange of ``decide``, if there is something to compare. First compile all that its result may select."""
    record = record_of(group, problem.device)
    with same_error(group):
        check_served(device, "" if group is None else group.group_name)
        asked = _decision_key(problem, arrays, record)
        known: Decision | None = record.agreed.get(asked)
        unread = _unread(arrays, asked, known, record)
        if known is not None and not unread and record.checked is None:
            record.calls += 1
            return known
        reaching = None if record is ALONE else problem.reaching
        within = asked if asked is not problem and (known is None or known.problem.within_documents) else None
        compiled = lambda each: compile_call(each, any_position=False, ahead=ahead)
        decision, with_copies, with_documents = compiled(problem), reaching and compiled(reaching), within and compiled(within)
        pushes = record is not ALONE and decision.problem.strategy == "push" and problem.device in COPYING
        copies = reaching is not None or pushes
        fits, held = _read(arrays, with_documents or decision, rank_in(group)) if unread else (within is not None, [])
        own = fits, reach(device) if copies else None, held
    found: Any = [own]
    if record is not ALONE:
        call = {"call": "ring_attention"} | problem.fingerprint()
        found = exchange(call, own, group, timeout(group, problem.device))  # type: ignore[arg-type]
    fits, reached, held = zip(*found, strict=True)
    for name, each in zip(("extents", "key_extents"), zip(*held, strict=True), strict=False):
        check_order(name, each)
    if copies:
        ranks = [Reach(*each) for each in reached]
        if with_copies is None:
            check_access(ranks)
        elif can_share(ranks):
            decision = with_copies
    if with_documents and all(fits):
        decision = with_documents
    add_newest(record.agreed, asked, decision)  # all ranks add, and so later forget, the same problems
    if unread and decision.problem.within_documents:
        add_newest(record.read, (asked, Unchanged(arrays.extents)), most=MAX_READ)
    return decision


def _decision_key(problem: Problem, arrays: Arrays, record: History) -> Problem:
    """Return the key of a decision: ``problem``, or if the values of its extents may change the decision, ``problem.within``."""
    if arrays.extents is None or record is ALONE or (problem.device not in EACH_TIME and arrays.extents.is_inference()):
        return problem
    return problem.within or problem


def _unread(arrays: Arrays, asked: Problem, known: Decision | None, record: History) -> bool:
    """Return whether this rank must read the call's intervals. It cannot during the capture of a CUDA graph."""
    if (arrays.extents is None and arrays.key_extents is None) or capturing(asked.device):
        return False
    if known is None or asked.device in EACH_TIME:
        return True
    return known.problem.within_documents and (asked, Unchanged(arrays.extents)) not in record.read


def _read(arrays: Arrays, decision: Decision, rank: int) -> tuple[bool, list[tuple[bool, bool] | None]]:
    """Return whether the extents stay within the documents, if the decision assumes it, and each array's ``where_held``."""
    check_intervals(arrays, plan := decision.problem.plan, rank)
    fits = decision.problem.within_documents
    if arrays.extents is not None and isinstance(decision.steps, NeededPlan):
        extents = arrays.extents.cpu().numpy()
        if not fits:
            check_available(extents, decision.steps, rank)
        fits = fits and unavailable(extents, decision.steps, rank) is None
    alike = plan.q_runs == plan.k_runs  # a query and a key of an index have one position
    held = lambda x: None if x is None or not alike else where_held(x.cpu().numpy(), plan.q_runs[rank], rank * plan.seq_local)
    return fits, [held(arrays.extents), held(arrays.key_extents)]


def check_intervals(arrays: Arrays, plan: RingPlan, rank: int) -> None:
    if arrays.extents is not None:
        check_extents(arrays.extents.long(), plan.q_runs[rank], plan.kv_length)
    if arrays.key_extents is not None:
        check_key_extents(arrays.key_extents.long(), plan.k_runs[rank], plan.length)
