"""The schedules of the strategy "direct" in the cost model: slices of keys at each step, or one exchange in a balanced layout."""

from __future__ import annotations

from dataclasses import fields

from .direct import DirectPlan
from .passes import Pass, Work
from .ring import RingPlan

SLICE, NEEDED = 13, 2
"""Numbers of launches of PyTorch, each of which takes time on the host.

SLICE: launches that copy a step's slices into place. NEEDED: launches that select the keys to send in a balanced layout, or
that put the received keys into place.
"""


def direct(run: Pass, group: int) -> None:
    """Schedule the strategy "direct": during a step, send the slices of the next step and the gradients of the previous step."""
    line, load, plan = run.line, run.load, run.load.plan
    crosses = load.hosts > 1
    if load.needed is not None:
        return _needed(run, load.needed.busiest(load.even) * load.kv / max(plan.kv_local, 1))
    sliced = DirectPlan(**{field.name: getattr(plan, field.name) for field in fields(RingPlan)})
    of_token = load.kv / max(plan.kv_local, 1)
    returning: float | None = None
    for before, shift in zip(plan.shifts, plan.shifts[1:], strict=False):
        tokens = max(sliced.sent(owner, shift) for owner in load.sample)
        size = tokens * of_token
        arriving = line.send(size * load.item, crosses)
        _direct_step(run, before, returning)
        returning = _sent_back(run, sliced, before)
        line.wait(arriving)
        line.copy((load.kv + 2 * size) * load.item, SLICE)
    _direct_step(run, plan.shifts[-1], returning)
    line.wait(_sent_back(run, sliced, plan.shifts[-1]))


def _needed(run: Pass, size: float) -> None:
    """Schedule "direct" in a balanced layout: an exchange of ``size`` elements, one step, and in the backward their gradients."""
    line, load, item, wide = run.line, run.load, size * run.load.item, size * run.load.wide
    works = [run.work(shift) for shift in load.plan.shifts]
    line.copy(2 * item, NEEDED)
    line.wait(line.send(item, load.hosts > 1))
    line.copy(2 * item, NEEDED)
    line.compute(run.seconds(Work(sum(each.pairs for each in works), 1.0), False))
    if run.backward:
        line.copy(2 * wide, NEEDED)
        line.wait(line.send(wide, load.hosts > 1))
        line.copy(3 * wide, load.plan.ranks - 1)


def _direct_step(run: Pass, shift: int, returning: float | None) -> None:
    run.line.compute(run.seconds(run.work(shift), True))
    run.line.wait(returning)


def _sent_back(run: Pass, sliced: DirectPlan, shift: int) -> float | None:
    if not run.backward or not shift:
        return None
    load = run.load
    size = max(sliced.sent(owner, shift) for owner in load.sample) * load.kv / max(load.plan.kv_local, 1)
    run.line.copy(3 * size * load.wide)
    return run.line.send(size * load.wide, load.hosts > 1)
