"""The GPUs whose memory each rank can copy, which the ranks of a group exchange once.

The strategy "push" needs this access; strategy="auto" selects it only if the ranks have it.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ring_attn_core.problem.problem import Problem

from .agreement import exchange, same_error
from .groups import Group, capturing

_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Reach(NamedTuple):
    """The host and the GPU of a rank, and the visible GPUs, by UUID, whose memory it can copy (with itself) or not. Visible are
    those that the rank's process sees; ``index``: the number of the rank's GPU among them."""

    host: str
    gpu: str = ""
    index: int = 0
    reached: Sequence[str] = ()
    cut_off: Sequence[str] = ()


def reach(device: torch.device) -> Reach:
    """Return this rank's host, its GPU, and the GPUs whose memory that GPU can copy. Without a GPU return only the host."""
    if device.type != "cuda":
        return Reach(host())
    mine, visible = device.index, range(torch.cuda.device_count())
    gpus = [str(torch.cuda.get_device_properties(gpu).uuid) for gpu in visible]
    reached = [gpus[gpu] for gpu in visible if gpu == mine or torch.cuda.can_device_access_peer(mine, gpu)]
    return Reach(host(), gpus[mine], mine, reached, [gpu for gpu in gpus if gpu not in reached])


def shared(ranks: Sequence[Reach]) -> bool:
    """Return True if all ranks are on one host, no two share a GPU or an ``index``, and each GPU can copy the others' memory."""
    gpus = {each.gpu for each in ranks}
    apart = len(gpus) == len({each.index for each in ranks}) == len(ranks)
    return apart and not cut_off(ranks) and all(gpus <= {*each.reached} for each in ranks)


def cut_off(ranks: Sequence[Reach]) -> str:
    """Return why the GPU of some rank cannot copy the memory of other ranks' GPUs, or "" if no reason is known."""
    gpus = {each.gpu for each in ranks}
    for rank, each in enumerate(ranks):
        if each.host != ranks[0].host:
            return f"rank {rank} is on another host"
    for rank, each in enumerate(ranks):
        if gpus & {*each.cut_off}:
            return f"the GPU of rank {rank} does not reach that of the others"
    return ""


class Access(NamedTuple):
    """The results of ``shared`` and ``cut_off`` for the ranks of a group."""

    shared: bool
    cut_off: str


_known: WeakKeyDictionary[dist.ProcessGroup, Access] = WeakKeyDictionary()


def access(group: dist.ProcessGroup, device: torch.device, problem: Problem | None = None) -> Access:
    """Return the access of a group's ranks to each other's GPUs. Its first call is a collective, also over ``problem``."""
    if group not in _known:
        call = "the reach of GPUs" if problem is None else {"call": "ring_attention"} | problem.fingerprint()
        ranks = [Reach(*each) for each in exchange(call, reach(device), group)]
        _known[group] = Access(shared(ranks), cut_off(ranks))
    return _known[group]


def with_reach(problem: Problem, device: torch.device, group: Group, may_exchange: bool = True) -> Problem:
    """Return ``problem.reaching`` if "auto" takes another strategy with reach, and the ranks have it; else return ``problem``.

    The first call of a group is a collective, and only later ones go without ``may_exchange``. During CUDA graph capture GPUs
    count as without reach, because a graph cannot contain "push".
    """
    if group is None:
        return problem
    with same_error(group):
        reaching = problem.reaching
    if reaching is None or capturing(problem.device) or not (may_exchange or group in _known):
        return problem
    return reaching if access(group, device, problem).shared else problem


def check_access(group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise ValueError, the same on every rank, if a rank is on another host or its GPU cannot reach the others' memory."""
    if why := access(group, device).cut_off:
        raise ValueError(
            f'strategy="push" copies between GPUs that reach each other\'s memory, and {why}: pass another strategy, or '
            'strategy="auto", which takes one that can'
        )


def host() -> str:
    """Return a name that tells this host from others: its network name and, on Linux, the id of its last boot."""
    try:
        return f"{platform.node()} {_BOOT.read_text().strip()}"
    except OSError:
        return platform.node()
