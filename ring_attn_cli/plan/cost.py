"""The cost model of the strategies: the predicted forward time, backward time and peak memory of one rank on a machine.

Each strategy is a schedule of launches and transfers on a ``Timeline``, in the order in which ``ring/strategies/`` starts them.
All transfers share one queue, like those of a process group in PyTorch, except the copies of "push".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from ring_attn_core.plan.direct import DirectPlan
from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.plan.two_level import TwoLevelPlan
from ring_attn_core.plan.ulysses import HeadSplit

from .gpus import Machine
from .load import ITEM, WIDE, Load, Seconds
from .timeline import Timeline

GATHERED, EXCHANGED = 1.12, 1.50
"""Factors by which the backward's matrix products take longer on joined keys ("gather"), and on joined keys and queries
("ulysses"): measured on two H200s."""

EXCHANGE = 6
"""Number of PyTorch launches that reorder arrays before an exchange of heads; as many follow it. Each takes time on the host."""

SLICE = 13
"""Number of PyTorch launches that copy the slices of a step of "direct" into place. Each takes time on the host."""

AHEAD = 3
"""Number of buffers in which a rank receives shards of keys under "push": the slots of ``push.py``."""


class Work(NamedTuple):
    """The visible pairs of a step, and the share of a rank's queries that see a key in this step."""

    pairs: float
    queries: float


@dataclass
class Pass:
    """One pass of a call on a machine, forward or backward: its timeline, and the seconds of its steps."""

    load: Load
    machine: Machine
    backward: bool

    def __post_init__(self) -> None:
        load, machine = self.load, self.machine
        self.line = Timeline(machine, load.local, machine.host_backward if self.backward else machine.host_forward)
        self.rate = load.backward_rate(machine) if self.backward else load.forward_rate(machine)

    def seconds(self, work: Work, continued: bool, slower: float = 1.0) -> float:
        """Return a step's predicted seconds; ``continued``: its online-softmax state comes from or goes to another step."""
        machine, load = self.machine, self.load
        query_step = machine.backward_step if self.backward else machine.forward_step
        query_step += machine.forward_state if continued and not self.backward else 0.0
        products = load.operations(work.pairs)[self.backward] / self.rate * (slower if self.backward else 1.0)
        return products + query_step * load.q * work.queries * load.head_dim / 128

    def work(self, shift: int) -> Work:
        """Return the work of the step at ``shift``: the maximum of each field of ``Work`` over the ranks in ``load.sample``."""
        return self.of_shifts(dict.fromkeys(self.load.sample, shift))

    def of_shifts(self, shifts: dict[int, int]) -> Work:
        """Return the maximum of each field of ``Work`` over ranks, each at its own shift back to the owner of its keys."""
        load = self.load
        queries = max(load.queries(rank, shift) for rank, shift in shifts.items())
        return Work(max(load.area(rank, shift) for rank, shift in shifts.items()), queries / max(load.plan.seq_local, 1))


def seconds(name: str, load: Load, machine: Machine, group: int = 0) -> Seconds:
    """Return the forward and backward time in seconds; ``group``: ranks per group of "ulysses" or host of "two_level"."""
    passes = []
    for backward in (False, True):
        run = Pass(load, machine, backward)
        SCHEDULES[name](run, group)
        passes.append(run.line.end)
    return Seconds(*passes)


def memory(name: str, load: Load, group: int = 0) -> int:
    """Predict the peak bytes that a strategy holds in the backward, besides a rank's q, k, v, out and gradients."""
    keys, gradients, ranks = load.keys, load.gradients, load.plan.ranks
    if name == "gather":
        return ranks * (keys + 3 * gradients)
    if name == "ulysses":
        sent = ITEM * (load.q * 3 * load.head_dim + load.kv * _head_split_of(load, group).copies)
        return 3 * sent + WIDE * (load.q * load.head_dim + 2 * load.kv) + (group < ranks) * (keys + 2 * gradients)
    if name == "push":
        return 3 * keys + 4 * gradients  # the slots of keys and of the inbox, and two gradients on their way to an inbox
    shards = {"ring": 1, "direct": 1, "two_way": 2, "two_level": 2}[name]
    return shards * (keys + 2 * gradients)


def _ring(run: Pass, group: int) -> None:
    load = run.load
    _one_way(run, [run.work(shift) for shift in load.plan.shifts], load.kv, load.hosts > 1, load.plan.home > 0)


def _one_way(run: Pass, works: Sequence[Work], kv: float, crosses: bool, home: bool, slower: float = 1.0) -> None:
    """Schedule the steps of a ring; each but the last sends ``kv`` elements to the next rank while it computes. ``crosses``:
    between hosts. ``home``: a last transfer returns the gradients. ``slower``: factor of the backward's matrix products."""
    line = run.line
    travelling: float | None = None
    for number, each in enumerate(works):
        last = number + 1 == len(works)
        arriving = None if last else line.send(kv * ITEM, crosses)
        line.wait(travelling)
        line.compute(run.seconds(each, len(works) > 1, slower))
        if run.backward and (not last or home):
            travelling = line.send(kv * WIDE, crosses)
        line.wait(arriving)
    line.wait(travelling)


def _direct(run: Pass, group: int) -> None:
    """Schedule the strategy "direct": during a step, send the slices of the next step and the gradients of the previous step."""
    line, load, plan = run.line, run.load, run.load.plan
    sliced = DirectPlan(**{field.name: getattr(plan, field.name) for field in fields(RingPlan)})
    returning: float | None = None

    def size(shift: int) -> float:
        return max(sliced.sent(owner, shift) for owner in load.sample) * load.kv / max(plan.kv_local, 1)

    def step(shift: int, returning: float | None) -> float | None:
        line.compute(run.seconds(run.work(shift), True))
        line.wait(returning)
        if not run.backward or not shift:
            return None
        line.copy(3 * size(shift) * WIDE)
        return line.send(size(shift) * WIDE, load.hosts > 1)

    for before, shift in zip(plan.shifts, plan.shifts[1:], strict=False):
        arriving = line.send(size(shift) * ITEM, load.hosts > 1)
        returning = step(before, returning)
        line.wait(arriving)
        line.copy((load.kv + 2 * size(shift)) * ITEM, SLICE)
    line.wait(step(plan.shifts[-1], returning))


def _two_way(run: Pass, group: int) -> None:
    """Schedule "two_way": keys and gradients of one direction travel while the GPU computes a step of the other direction."""
    line, load = run.line, run.load
    crosses = load.hosts > 1
    ways = [list(way) for way in load.plan.ways if way]
    arriving: list[float | None] = [line.send(load.keys, crosses) for _ in ways]
    travelling: list[float | None] = [None] * len(ways)
    line.compute(run.seconds(run.work(0), True))
    for turn in range(max(map(len, ways), default=0)):
        for at, way in enumerate(ways):
            if turn >= len(way):
                continue
            line.wait(arriving[at])
            last = turn + 1 == len(way)
            arriving[at] = None if last else line.send(load.keys, crosses)
            line.wait(travelling[at])
            line.compute(run.seconds(run.work(way[turn]), True))
            if run.backward:
                travelling[at] = line.send(load.gradients, crosses)
    for arrival in travelling:
        line.wait(arrival)


def _gather(run: Pass, group: int) -> None:
    """Schedule "gather": gather all keys before the only step, and in the backward return their gradients after it."""
    line, load = run.line, run.load
    ranks = load.plan.ranks
    across = (load.plan.ranks - load.local) / load.local  # each shard comes to a host once, over one of its links
    line.wait(line.collect((ranks - 1) * load.keys, across * load.keys))
    line.copy(2 * ranks * load.keys)
    work = max(sum(load.area(rank, shift) for shift in load.plan.shifts) for rank in load.sample)
    line.compute(run.seconds(Work(work, 1.0), False, GATHERED))
    if run.backward:
        sent = load.gradients
        line.copy(2 * ranks * sent)
        line.wait(line.collect((ranks - 1) * sent, (ranks - load.local) * sent))
        line.copy(3 * ranks * sent, 1)


def _head_split_of(load: Load, group: int) -> HeadSplit:
    return HeadSplit(load.heads, load.kv_heads, group)


def _ulysses(run: Pass, group: int) -> None:
    """Schedule the strategy "ulysses": split heads over each group by an all-to-all, run a ring of groups, undo the split."""
    line, load, plan = run.line, run.load, run.load.plan
    head_split, across = _head_split_of(load, group), load.host_ranks < group
    kv = load.kv * head_split.copies / group
    q = load.q / group
    lse = WIDE * q
    there, back = ITEM * (q * load.head_dim + kv), ITEM * q * load.head_dim + lse
    if run.backward:
        there += 2 * ITEM * q * load.head_dim + 2 * lse
        back = ITEM * q * load.head_dim + kv * (ITEM if head_split.copies == 1 else WIDE)

    def exchange(size: float) -> None:
        line.copy(2 * size * group, EXCHANGE)
        line.wait(line.collect((min(group, load.local) - 1) * size, (group - load.local) * size if across else 0.0))
        line.copy(2 * size * group, EXCHANGE)

    exchange(there)
    groups = range(0, plan.ranks, group)
    pairs = [_group_pairs(run, shift, group) / group for shift in groups]
    needed = [Work(each, 1.0) for number, each in enumerate(pairs) if each or not number]
    _one_way(run, needed, kv * group, load.hosts > 1, len(needed) > 1, EXCHANGED)
    exchange(back)


def _group_pairs(run: Pass, shift: int, group: int) -> int:
    """Return the most visible pairs that a group of a sampled rank has with the keys of the group ``shift`` ranks before it."""
    load, plan = run.load, run.load.plan
    if group == plan.ranks:
        return plan.mask.area(plan.length, plan.kv_length)
    firsts = {rank - rank % group for rank in load.sample}
    members = [(q, k) for q in range(group) for k in range(group)]
    return max(sum(load.area(first + q, (shift + q - k) % plan.ranks) for q, k in members) for first in firsts)


def _two_level(run: Pass, group: int) -> None:
    """Schedule "two_level": during an inner ring, its keys and the previous one's gradients cross to the next host."""
    line, load, plan = run.line, run.load, run.load.plan
    levels = TwoLevelPlan(**{field.name: getattr(plan, field.name) for field in fields(RingPlan)}, host_ranks=group)
    left: float | None = None
    sums: float | None = None
    keys, gradients = load.keys, load.gradients
    for ring in levels.inner_rings:
        crossing = line.send(keys, load.hosts > 1) if ring.crossing else None
        if ring.inner[0]:
            line.wait(line.send(keys))
        travelling: float | None = None
        for number, inner in enumerate(ring.inner):
            arriving = line.send(keys) if number + 1 < len(ring.inner) else None
            line.wait(travelling)
            line.compute(run.seconds(run.of_shifts({r: levels.shift(r, ring.outer, inner) for r in load.sample}), True))
            if run.backward:
                travelling = line.send(gradients)
                if left is not None:  # gradient sums of the previous inner ring cross during these steps
                    line.wait(left)
                    line.wait(sums)
                    line.copy(3 * gradients)
                    sums, left = line.send(gradients, load.hosts > 1), None
            line.wait(arriving)
        left = travelling
        line.wait(crossing)
    if run.backward:
        line.wait(left)
        line.wait(sums)
        line.wait(line.send(gradients, load.hosts > 1) if levels.crossing_home else None)


def _push(run: Pass, group: int) -> None:
    """Schedule "push": a copy engine brings shards from their owners up to AHEAD steps ahead. In the backward it also sends each
    step's gradients to the owner, which adds them to its own sum one step later."""
    line, load = run.line, run.load
    line.host_step = run.machine.host_push_backward if run.backward else run.machine.host_push_forward
    steps = len(load.plan.shifts)
    arriving = {i: line.peer_copy(load.keys) for i in range(1, min(AHEAD + 1, steps))}
    returning: float | None = None
    for i, shift in enumerate(load.plan.shifts):
        line.wait(arriving.get(i))
        line.compute(run.seconds(run.work(shift), True))
        if run.backward and i:
            sent = line.peer_copy(load.gradients)
            _add_from_inbox(run, returning)
            returning = sent
        if 0 < i < steps - AHEAD:
            arriving[i + AHEAD] = line.peer_copy(load.keys)
    _add_from_inbox(run, returning)


def _add_from_inbox(run: Pass, arrival: float | None) -> None:
    if arrival is not None:
        run.line.wait(arrival)
        run.line.copy(3 * run.load.gradients, 0)


SCHEDULES = {
    "ring": _ring,
    "direct": _direct,
    "two_way": _two_way,
    "gather": _gather,
    "ulysses": _ulysses,
    "two_level": _two_level,
    "push": _push,
}
"""For each strategy, the function that adds its launches and transfers to the timeline of a pass. Arguments: (pass, group)."""
