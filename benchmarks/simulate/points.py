"""The measured points: calls of benchmarks/results as loads of the cost model, and which ones its records were fitted to."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from typing import Any, NamedTuple

from ring_attn_core import causal
from ring_attn_core.plan.cost import SCHEDULES, seconds
from ring_attn_core.plan.load import Load, Seconds
from ring_attn_core.plan.machine import H100, H200, Machine

from ..ring.problem import Call
from ..support.report import RESULTS

_DOCTOR: dict[str, Any] = json.loads((RESULTS / "auto-h200-x2.json").read_text())["record"]

HOST_IN_STEPS = Machine(**{name: value for name, value in _DOCTOR.items() if name != "version"})
"""A record of ring-attn doctor from when its times of attention included the host's time to launch it."""

_HOST = [field.name for field in fields(Machine) if field.name.startswith("host_")]
_PEER: dict[str, Any] = {name: getattr(HOST_IN_STEPS, name) for name in ("peer", "peer_latency")}

IN_A_ROW = replace(H200, name="NVIDIA H200, calls in a row", **_PEER, **dict.fromkeys(_HOST, 0.0))
"""The record of the H200 with a measured copy engine, for calls that follow one another, which hides the time of the host."""

HOST_BOUND = replace(H200, name="NVIDIA H200, slower host", **_PEER, **{name: getattr(HOST_IN_STEPS, name) for name in _HOST})
"""The record of the H200 with the host and the copy engine of that machine, for calls so short that the host is the limit."""

WITH_PEERS = replace(H200, name="NVIDIA H200, copy engine", **_PEER)
"""The record of the H200 with a measured copy engine."""

FILES = (("ring-h200-x2", H200), ("auto-h200-x2", IN_A_ROW), ("ring-h100-x4", H100), ("documents-h100-x4", H100))
"""The results, and the records of the machines on which they were measured."""

AGAIN = "ring-h200-x2", WITH_PEERS
"""The result whose later runs, "again" in its file, were made when the model was finished, and the record for them."""


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
    """Return the measured points, without those of balanced layouts, in which "auto" is the ring."""
    rows = [(row, machine) for name, machine in FILES for row in _stored(name)["rows"]]
    rows += [(row, AGAIN[1]) for run in _stored(AGAIN[0])["again"] for row in run["rows"]]
    return [_point(*each) for each in rows if each[0]["candidate"] in SCHEDULES and "balanced" not in each[0]["call"]]


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
    whole, documents = causal().area(tokens * ranks, tokens * ranks), call.mask == "documents"
    share = sum(causal().area(n, n) for n in call.documents(ranks)) / whole if documents else 1.0
    access = machine.peer > 0
    load = Load(call.plan(ranks), 1, heads, kv_heads, dim, dim, 2, ranks, share, documents, access)
    usual = heads == 32 and call.mask == "causal" and row["framework"] == "torch"
    if machine in (IN_A_ROW, HOST_BOUND, WITH_PEERS):
        fitted = False
    elif machine == H200:
        fitted = (usual and tokens <= 8192) or (documents and strategy == "ring" and row["framework"] == "torch")
    else:
        fitted = usual and (tokens == 2048 or (tokens == 8192 and strategy in ("ring", "direct")))
    measured = Seconds(row["forward ms"] / 1e3, row["backward ms"] / 1e3)
    return Point(machine, row["framework"], row["call"], strategy, measured, load, fitted)


def undescribed(point: Point) -> bool:
    """Return True if the cost model does not describe the point.

    These are documents on joined shards, and documents in contiguous: the model spreads the pairs of documents over all steps
    alike, while in contiguous nearly all of them are in a rank's own shard. If the host is the
    limit, what it does besides launches and transfers is missing.
    """
    if point.machine == HOST_BOUND:
        return True
    return point.load.extents and (point.strategy in ("gather", "ulysses") or point.load.plan.layout == "contiguous")
