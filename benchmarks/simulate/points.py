"""The measured points: calls of benchmarks/results as loads of the cost model, and which ones its records were fitted to."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from typing import Any, NamedTuple

from ring_attn_cli.plan.cost import SCHEDULES, seconds
from ring_attn_cli.plan.gpus import H100, H200, Machine
from ring_attn_cli.plan.load import Load, Seconds

from ..ring.problem import Call
from ..support.report import RESULTS

_RECORD: dict[str, Any] = json.loads((RESULTS / "auto-h200-x2.json").read_text())["record"]
_HOST = [field.name for field in fields(Machine) if field.name.startswith("host_")]

IN_A_ROW = replace(H200, name="NVIDIA H200, calls in a row", **dict.fromkeys(_HOST, 0.0))
"""The record of the H200 for calls that follow one another, which hides the time of the host."""

HOST_BOUND = replace(H200, name="NVIDIA H200, slower host", **{name: _RECORD[name] for name in _HOST})
"""The record of the H200 with the host of that machine, for calls so short that the host is the limit."""

AGAIN = replace(H200, name="NVIDIA H200, again")
"""The record of the H200 for later runs in "ring-h200-x2", made when the model was finished."""

FILES = (("ring-h200-x2", H200), ("auto-h200-x2", IN_A_ROW), ("ring-h100-x4", H100))
"""The results, and the records of the machines on which they were measured."""


class Point(NamedTuple):
    """A measured call and strategy. ``fitted``: True if the machine's record was fitted to it."""

    machine: Machine
    framework: str
    call: str
    strategy: str
    measured: Seconds
    load: Load
    fitted: bool

    def __str__(self) -> str:
        return f"{self.machine.name}, {self.framework}, {self.call}, {self.strategy}"

    @property
    def predicted(self) -> Seconds:
        """Return the time that the model predicts."""
        return seconds(self.strategy, self.load, self.machine, self.load.plan.ranks)

    def errors(self) -> Seconds:
        """Return predicted / measured time - 1, for the forward and for the backward."""
        return Seconds(*(a / b - 1 for a, b in zip(self.predicted, self.measured, strict=True)))

    def error(self) -> float:
        """Return predicted / measured time - 1, for forward and backward together."""
        return self.predicted.both / self.measured.both - 1


def points() -> list[Point]:
    """Return the measured points, without packed documents, whose work ``ring-attn plan --gpus`` does not know."""
    rows = [(row, machine) for name, machine in FILES for row in _stored(name)["rows"]]
    rows += [(row, AGAIN) for run in _stored("ring-h200-x2")["again"] for row in run["rows"]]
    return [_point(*each) for each in rows if each[0]["candidate"] in SCHEDULES and "documents" not in each[0]["call"]]


def _stored(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _point(row: dict[str, Any], machine: Machine) -> Point:
    found = re.match(r"([\d,]+) tokens, (\d+)/(\d+) heads of (\d+), (\w+).*, (\w+)", row["call"])
    assert found is not None
    tokens, heads, kv_heads, dim = (int(number.replace(",", "")) for number in found.groups()[:4])
    machine = HOST_BOUND if machine == IN_A_ROW and tokens <= 2048 else machine
    call, ranks, strategy = (
        Call(tokens, heads, kv_heads, found[5], dim=dim, layout=found[6]),
        row.get("ranks", 2),
        row["candidate"],
    )
    load = Load(call.plan(ranks), heads, kv_heads, dim, ranks)
    usual = heads == 32 and call.mask == "causal" and row["framework"] == "torch"
    if machine in (IN_A_ROW, HOST_BOUND, AGAIN):
        fitted = False
    elif machine == H200:
        fitted = usual and tokens <= 8192
    else:
        fitted = usual and (tokens == 2048 or (tokens == 8192 and strategy in ("ring", "direct")))
    measured = Seconds(row["forward ms"] / 1e3, row["backward ms"] / 1e3)
    return Point(machine, row["framework"], row["call"], strategy, measured, load, fitted)


def undescribed(point: Point) -> bool:
    """Return True if the host is the limit: the cost model misses what it does besides launches and transfers."""
    return point.machine == HOST_BOUND
