"""One pass of a call on a machine, forward or backward, with the predicted time of each step's kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .load import Load
from .machine import Machine
from .timeline import Timeline

EXTENTS = 3.9
"""Factor that multiplies a backward step's time, its matrix products excluded, if the call has extents: measured on two H200s."""


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
        of_query = machine.backward_step if self.backward else machine.forward_step
        of_query += machine.forward_state if continued and not self.backward else 0.0
        of_query *= EXTENTS if load.extents and self.backward else 1.0
        products = load.operations(work.pairs)[self.backward] / self.rate * (slower if self.backward else 1.0)
        return products + of_query * load.q * work.queries * load.v_dim / 128

    def work(self, shift: int) -> Work:
        """Return the work of the step at ``shift``: the maximum of each field of ``Work`` over the ranks in ``load.sample``."""
        return self.of_shifts(dict.fromkeys(self.load.sample, shift))

    def of_shifts(self, shifts: dict[int, int]) -> Work:
        """Return the maximum of each field of ``Work`` over ranks, each at its own shift back to the owner of its keys."""
        load = self.load
        queries = max(load.queries(rank, shift) for rank, shift in shifts.items())
        return Work(max(load.area(rank, shift) for rank, shift in shifts.items()), queries / max(load.plan.seq_local, 1))
