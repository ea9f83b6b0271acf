"""Access to the memory of other ranks' GPUs: which each rank can copy, and the rendezvous by which ranks map symmetric memory.

The strategy "push" needs this access; strategy="auto" selects it only if the ranks have it.

PyTorch numbers the exchanges of a rendezvous by a counter of the process, not of the group (``StoreExchange`` in PyTorch's
CUDASymmetricMemoryUtils.hpp, 2.11 to 2.13). If only some ranks of a group have had a rendezvous in a smaller group before, their
counters are ahead, and every rank waits for keys that no rank writes. So each rendezvous here has a store that renames the keys,
and thereby numbers the exchanges from 0.
"""

from __future__ import annotations

import itertools
import platform
import re
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import history_of
from .groups import rank_in, ranks_of, store_of
from .transfer import lost_error

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


def can_share(ranks: Sequence[Reach]) -> bool:
    """Return True if all ranks are on one host, no two share a GPU or an ``index``, and each GPU can copy the others' memory."""
    gpus = {each.gpu for each in ranks}
    apart = len(gpus) == len({each.index for each in ranks}) == len(ranks)
    return apart and not find_cut_off(ranks) and all(gpus <= {*each.reached} for each in ranks)


def find_cut_off(ranks: Sequence[Reach]) -> str:
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
    if why := find_cut_off(ranks):
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


def rendezvous(buffer: Tensor, group: dist.ProcessGroup, patience: timedelta) -> Any:
    """Map each rank's ``buffer`` into all ranks, which all call this. Return torch's handle, or raise LostRank if one is late."""
    from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory, _unregister_process_group

    store = Renumbered(group, patience)
    same = dist.ProcessGroup(store, rank_in(group), ranks_of(group))
    name: Any = f"{group.group_name}/{store.name}"
    _register_process_group(name, same)
    try:
        return _SymmetricMemory.rendezvous(buffer, name)
    finally:
        _unregister_process_group(name)


class Renumbered(dist.Store):  # type: ignore[attr-defined]
    """The group's store for one rendezvous. It renames a key "CUDASymmetricMemory/7/2" to ``name``/n/2: 7 is PyTorch's number of
    the exchange, n that within the rendezvous, from 0, and 2 the rank. ``agreement.py`` deletes the keys later."""

    def __init__(self, group: dist.ProcessGroup, patience: timedelta) -> None:
        super().__init__()
        self._group, self._store, self._patience = group, store_of(group), patience
        self.name = history_of(group).next_call()
        self._numbers: dict[str, int] = defaultdict(itertools.count().__next__)

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), value)
        history_of(self._group).written.append(self._key(key))

    def get(self, key: str) -> Any:
        return self._store.get(self._key(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        try:
            self._store.wait([self._key(key) for key in keys], timeout or self._patience)
        except RuntimeError as error:
            ranks = ", ".join(f"rank {key.rpartition('/')[2]}" for key in keys)
            raise lost_error(error, f"{ranks}, to map its memory", self._group) from error

    def _key(self, key: str) -> str:
        if found := re.fullmatch(r"(.*/\d+)/(\d+)", key):
            return f"{self.name}/{self._numbers[found[1]]}/{found[2]}"
        return f"{self.name}/{key}"
