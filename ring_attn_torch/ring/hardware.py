"""Rank 0's record of measured speeds. On GPUs all ranks receive it, once per group, and use it for ``strategy="auto"``."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ring_attn_core.plan.machine import Machine
from ring_attn_core.plan.measured import Hardware, host, ranks_of_a_host, stored
from ring_attn_core.problem.problem import Problem
from ring_attn_core.records import MOST_KNOWN

from .agreement import exchange, same_error
from .groups import Group, rank_in
from .reach import Reach, reach, shared

MEASURED = ("cuda",)
"""The device types whose records are read. CPUs use none, so that no test depends on a user's record."""

_known: WeakKeyDictionary[dist.ProcessGroup, Hardware] = WeakKeyDictionary()


def on_hardware(problem: Problem, device: torch.device, group: Group, may_exchange: bool = True) -> Problem:
    """Add rank 0's record of measured speeds to ``problem`` if strategy "auto" can use it, else return ``problem`` unchanged.

    The first call of a group is a collective: the ranks exchange rank 0's record, their host names, and the GPUs whose memory
    they can copy. Later calls, and those without ``may_exchange`` or during capture, read only the cache. A graph cannot
    contain "pull" and "push", so during capture the problem says that GPUs do not reach each other's memory.
    """
    if group is None or problem.ranks == 1 or problem.device not in MEASURED or problem.options.strategy != "auto":
        return problem
    known, capturing = _known.get(group), torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    if known is None:
        if not may_exchange or capturing:
            return problem
        known = _known[group] = _exchanged(problem, device, group)
    return problem if known.machine is None else _with(problem, known, known.peer_access and not capturing)


def _exchanged(problem: Problem, device: torch.device, group: dist.ProcessGroup) -> Hardware:
    with same_error(group):
        problem.check()
        record = stored("torch", device_name(device)) if rank_in(group) == 0 else None
        mine = [host(), None if record is None else record.to_json(), reach(device)]
    sent = exchange({"call": "ring_attention"} | problem.fingerprint(), mine, group)
    if None in sent:
        raise RuntimeError(
            f'this rank runs its first call with strategy="auto" on this group, and rank {sent.index(None)} does not: every rank '
            "must make the same calls in the same order"
        )
    hosts, records, reached = zip(*sent, strict=True)
    machine = None if records[0] is None else Machine.from_json(records[0])
    return Hardware(machine, ranks_of_a_host(hosts), shared([Reach(*each) for each in reached]))


def device_name(device: torch.device) -> str:
    """Return the name of a GPU."""
    return torch.cuda.get_device_name(device)


@lru_cache(maxsize=MOST_KNOWN)
def _with(problem: Problem, known: Hardware, peer_access: bool) -> Problem:
    return replace(problem, machine=known.machine, host_ranks=known.host_ranks, peer_access=peer_access)
