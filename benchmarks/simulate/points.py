"""The measured points: calls of benchmarks/results/ring-h200-x2.json as loads of the cost model, and which ones were fitted."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from ring_attn_core import causal
from ring_attn_core.plan.cost import SCHEDULES, seconds
from ring_attn_core.plan.load import Load, Seconds
from ring_attn_core.plan.machine import Machine

from ..ring.problem import Call
from ..support.report import RESULTS

RANKS = 2


class Point(NamedTuple):
    """A measured call and strategy. ``fitted``: True if the machine's record was fitted to it."""

    framework: str
    call: str
    strategy: str
    measured: Seconds
    load: Load
    fitted: bool

    def errors(self, machine: Machine) -> Seconds:
        """Return predicted / measured time - 1, for the forward and for the backward."""
        predicted = seconds(self.strategy, self.load, machine, RANKS)
        return Seconds(*(a / b - 1 for a, b in zip(predicted, self.measured, strict=True)))

    def error(self, machine: Machine) -> float:
        """Return predicted / measured time - 1, for forward and backward together."""
        return seconds(self.strategy, self.load, machine, RANKS).both / self.measured.both - 1


def points() -> list[Point]:
    """Return the measured points of two H200s."""
    rows: list[dict[str, Any]] = json.loads((RESULTS / "ring-h200-x2.json").read_text())["rows"]
    return [_point(row) for row in rows if row["candidate"] in SCHEDULES]


def _point(row: dict[str, Any]) -> Point:
    found = re.match(r"([\d,]+) tokens, (\d+)/(\d+) heads of (\d+), (\w+)", row["call"])
    assert found is not None
    tokens, heads, kv_heads, dim = (int(number.replace(",", "")) for number in found.groups()[:4])
    call = Call(tokens, heads, kv_heads, found[5], dim=dim)
    whole = causal().area(tokens * RANKS, tokens * RANKS)
    share = sum(causal().area(n, n) for n in call.documents(RANKS)) / whole if call.mask == "documents" else 1.0
    load = Load(call.plan(RANKS), 1, heads, kv_heads, dim, dim, 2, RANKS, share, call.mask == "documents")
    short_or_usual = heads == 32 and tokens <= 8192 and call.mask == "causal"
    fitted = row["framework"] == "torch" and (short_or_usual or (call.mask == "documents" and row["candidate"] == "ring"))
    measured = Seconds(row["forward ms"] / 1e3, row["backward ms"] / 1e3)
    return Point(row["framework"], row["call"], row["candidate"], measured, load, fitted)


def joined_documents(point: Point) -> bool:
    """Return True if the strategy computes on joined shards with extents, which the cost model does not describe."""
    return point.load.extents and point.strategy in ("gather", "ulysses")
