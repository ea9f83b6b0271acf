"""A check that extents stay within the documents of a balanced layout, so that strategy="auto" may select "direct".

A rank can read only the extents of its own queries. So each rank checks its own extents, and all ranks exchange the results. On a
CPU this costs no extra exchange, because each call with extents makes one anyway. On GPUs each new tensor of extents costs one
exchange. Tensors made in inference mode are not checked on GPUs, so "auto" does not select "direct" for them. After a call whose
extents reach beyond the documents, "auto" no longer selects "direct" for equal problems: neither in later calls nor in the
backward of earlier calls.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ring_attn_core.problem.problem import Problem
from ring_attn_core.records import add_newest

from ..attend.recent import Unchanged
from ..ring.agreement import agree, same_error
from ..ring.groups import Group, capturing, rank_in, ranks_of
from .prepare import Arrays, checked

EACH_TIME = ("cpu",)
"""The device types on which extents are checked at each call. On other devices a remembered tensor is not checked again."""

MOST_LOOKED = 32
"""The largest number of tensors of extents that are remembered as checked. A remembered tensor stays in memory."""


class Found(NamedTuple):
    """The results of the checks of a group, equal on all its ranks. ``within``: by problem, True if all checked extents stay
    within the documents. ``looked``: the newest pairs (problem, extents) that do so, at most ``MOST_LOOKED``."""

    within: dict[Problem, bool]
    looked: dict[tuple[Problem, Unchanged], None]


_found: WeakKeyDictionary[dist.ProcessGroup, Found] = WeakKeyDictionary()


class Settled(NamedTuple):
    """A call's problem, with ``within_documents`` set if known of all ranks. ``checked``: this call has checked its extents."""

    problem: Problem
    checked: bool = False


def settle(problem: Problem, arrays: Arrays, group: Group) -> Settled:
    """Return the problem, with ``within_documents`` set if the extents of all ranks are found to stay within the documents."""
    with same_error(group):
        within, extents = problem.within, arrays.extents
        if within is None or extents is None or group is None or ranks_of(group) == 1 or capturing(problem.device):
            return Settled(problem)
        found, each_time = _found.setdefault(group, Found({}, {})), problem.device in EACH_TIME
        if not found.within.get(problem, True) or (extents.is_inference() and not each_time):
            return Settled(problem)
        this = None if each_time else (problem, Unchanged(extents))
        if this in found.looked:
            return Settled(within)
        compiled, rank = checked(within, anywhere=False), rank_in(group)
        compiled.check_intervals(arrays, rank)
        mine = compiled.within_documents(extents, rank)
    fit = all(agree(within, group, again=True, value=mine))
    add_newest(found.within, problem, fit)
    if fit and this is not None:
        add_newest(found.looked, this, most=MOST_LOOKED)
    return Settled(within, True) if fit else Settled(problem)


def settled(problem: Problem, group: Group) -> Problem:
    """Return the problem of a backward, with ``within_documents`` set if all extents checked so far lie within the documents."""
    if problem.within is None or group is None or capturing(problem.device):
        return problem
    return problem.within if group in _found and _found[group].within.get(problem, False) else problem
