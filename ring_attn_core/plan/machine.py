"""The record of a machine for the cost model: its rates, latencies and host times, with conversion to and from JSON.

``BUILT_IN`` holds records of hardware on which this library was measured; ``ring-attn doctor --measure`` makes new records.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ..files import parse_json
from ..records import hashed_once

VERSION = 1
"""The version of the JSON form. Records of other versions are refused."""


@hashed_once
@dataclass(frozen=True, kw_only=True)
class Machine:
    """The speed of one rank and of its links, in seconds and bytes. Fields with a default are 0 if they were not measured.

    ``forward_rate``, ``backward_rate``: operations per second of attention on long shards, with a head dim of 128 and elements of
    2 bytes (4 on a CPU). A visible pair takes 4 operations per head and dim forward, 10 backward. ``forward_step``,
    ``backward_step``: time of a step without its matrix products, for each (query, head) pair that sees a key, with a v_dim of
    128. ``forward_state``: addition for the online-softmax state of several steps. ``links``: pairs (n, rate): if n ranks of a
    host send at once, each sends and receives ``rate`` bytes per second. ``collective``: bytes per second received in an
    all-gather or all-to-all within a host. ``network``: bytes per second to another host. ``latency``, ``network_latency``: time
    before the first byte. ``host_...``: the host's time to start a step, a transfer or a copy. ``copies``: bytes per second moved
    in a rank's memory. ``contention``: a kernel takes longer by this fraction of its overlap with a transfer, because NCCL's
    kernels occupy multiprocessors. ``peer``, ``peer_latency``: the copy engine's rate from another GPU of the host, and its time
    before the first byte. ``host_pull_...``, ``host_push_...``: a step with transfers and flags. ``noise``: relative difference
    between repeats.
    """

    name: str
    forward_rate: float
    backward_rate: float
    forward_step: float
    forward_state: float
    backward_step: float
    links: tuple[tuple[int, float], ...]
    collective: float
    network: float
    latency: float
    network_latency: float
    host_forward: float
    host_backward: float
    host_send: float
    host_copy: float
    copies: float
    memory: float
    contention: float = 0.0
    peer: float = 0.0
    peer_latency: float = 0.0
    host_pull_forward: float = 0.0
    host_pull_backward: float = 0.0
    host_push_forward: float = 0.0
    host_push_backward: float = 0.0
    noise: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name must be the name of the hardware, got {self.name!r}")
        if not self.links or not all(len(pair) == 2 and isinstance(pair[0], int) and pair[0] > 1 for pair in self.links):
            raise ValueError(f"links must be pairs of a number of ranks, at least 2, and a rate, got {self.links!r}")
        object.__setattr__(self, "links", tuple(sorted((ranks, rate) for ranks, rate in self.links)))
        rates = [("links", rate) for _, rate in self.links]
        for name, value in [*((name, value) for name, value in asdict(self).items() if name not in ("name", "links")), *rates]:
            number = isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)
            above = name in RATES and name not in OPTIONAL
            if not number or value < 0 or (value == 0 and above):
                raise ValueError(f"{name} must be a finite number {'above' if above else 'of at least'} 0, got {value!r}")
        peak = next((rate for gpu, rate in PEAKS.items() if gpu in self.name), math.inf)
        for name in ("forward_rate", "backward_rate"):
            if (rate := getattr(self, name)) > peak:
                raise ValueError(
                    f"{name} must be at most {peak / 1e12:.0f} TFLOP/s, the peak of {self.name} in bfloat16, "
                    f"got {rate / 1e12:.0f}: run ring-attn doctor --measure again"
                )

    def link(self, ranks: int) -> float:
        """Return a link's bytes per second for ``ranks`` sending ranks, by the next larger measured number, or the largest."""
        return next((rate for of, rate in self.links if of >= ranks), self.links[-1][1])

    def to_json(self) -> str:
        """Return the record as JSON, with the version of the JSON form."""
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """Return the record that ``text`` holds as JSON. Raise ValueError if ``text`` is not such a record."""
        found: Any = parse_json(text)
        if not isinstance(found, dict) or found.get("version") != VERSION:
            version = found.get("version") if isinstance(found, dict) else None
            raise ValueError(f"it is not a record of version {VERSION}, but of {version!r}")
        names = {field.name for field in fields(cls)}
        wrong = sorted((names ^ (found.keys() - {"version"})) - (OPTIONAL - found.keys()))
        if wrong:
            raise ValueError(f"it lacks, or has besides the fields of a record: {', '.join(wrong)}")
        links = found["links"]
        if not isinstance(links, list) or not all(isinstance(pair, list) for pair in links):
            raise ValueError(f"links must be a list of pairs, got {links!r}")
        values: dict[str, Any] = {name: found[name] for name in names & found.keys()} | {"links": tuple(map(tuple, links))}
        return cls(**values)


NOISE = 0.1
"""The largest ``noise`` of a record that "auto" uses. Predictions from records of idle GPUs have an error of the same size
(docs/strategies.md), so smaller noise does not matter."""

PEAKS = {"A100": 312e12, "H100": 990e12, "H200": 990e12}
"""Peak FLOP/s of GPUs (SXM) in bfloat16 without sparsity, from their data sheets."""

RATES = ("forward_rate", "backward_rate", "links", "collective", "network", "copies", "memory", "peer")
"""The numeric fields in which a larger value is better. In all other numeric fields a smaller value is better."""

OPTIONAL = frozenset(field.name for field in fields(Machine) if field.default == 0)
"""The fields that a record may lack; a field that was not measured is 0."""


def slowest(machines: Sequence[Machine]) -> Machine:
    """Return a machine with the worst value of each field, in any order, because a ring waits for its slowest rank."""
    names = sorted({each.name for each in machines})
    worst: dict[str, Any] = {"name": " and ".join(names)}
    for field in fields(Machine):
        if field.name not in ("name", "links"):
            values = [getattr(each, field.name) for each in machines]
            worst[field.name] = min(values) if field.name in RATES else max(values)
    counts = sorted({ranks for each in machines for ranks, _ in each.links})
    worst["links"] = tuple((ranks, min(each.link(ranks) for each in machines)) for ranks in counts)
    return Machine(**worst)


H200 = Machine(
    name="NVIDIA H200",
    forward_rate=640e12,
    backward_rate=511e12,
    forward_step=0.384e-9,
    forward_state=0.434e-9,
    backward_step=0.339e-9,
    links=((2, 290e9), (4, 160e9), (8, 120e9)),
    collective=390e9,
    network=45e9,
    latency=28e-6,
    network_latency=30e-6,
    host_forward=28e-6,
    host_backward=460e-6,
    host_send=16e-6,
    host_copy=34e-6,
    copies=2.5e12,
    memory=141e9,
)
"""An H200 in a host with two to eight GPUs on NVLink. The links of 4 and 8 ranks were measured without kernels. The forward and
backward rates come from rings without transfers and from single launches. All other fields except nominal ones are fitted to
calls on two GPUs (benchmarks/simulate).
``memory``, ``network`` and ``network_latency`` are nominal: a network of 400 Gb/s for each GPU, 9 tenths of it data."""

H100 = replace(
    H200,
    name="NVIDIA H100",
    forward_rate=615e12,
    backward_rate=502e12,
    forward_step=0.2e-9,
    forward_state=0.18e-9,
    backward_step=0.34e-9,
    host_forward=75e-6,
    host_backward=310e-6,
    host_send=195e-6,
    host_copy=22e-6,
    copies=1.75e12,
    memory=80e9,
    contention=0.7,
    peer=374e9,
    peer_latency=5e-6,
    host_pull_forward=220e-6,
    host_pull_backward=600e-6,
    host_push_forward=245e-6,
    host_push_backward=620e-6,
)
"""An H100 in a host with four GPUs on NVLink, fitted to calls of 2,048 and 8,192 tokens on four GPUs (benchmarks/simulate).
``peer`` was measured without kernels; links, collectives and the network are those of the H200."""

BUILT_IN = (H200, H100)


def built_in(name: str) -> Machine | None:
    """Return the record of the hardware ``name``, or None if it was not measured. PCIe and NVL cards were not measured."""
    if "PCIe" in name or "NVL" in name:
        return None
    return next((each for each in BUILT_IN if each.name.removeprefix("NVIDIA ") in name.split()), None)
