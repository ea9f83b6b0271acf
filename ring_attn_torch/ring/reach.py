"""The GPUs whose memory each rank can copy.

The strategy "push" needs this access; strategy="auto" selects it only if the ranks have it.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

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


def check_access(ranks: Sequence[Reach]) -> None:
    """Raise ValueError if a rank is on another host or its GPU cannot reach the others' memory."""
    if why := cut_off(ranks):
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
