"""The rendezvous by which the ranks of a group map each other's symmetric memory.

PyTorch numbers the exchanges of a rendezvous by a counter of the process, not of the group (``StoreExchange`` in PyTorch's
CUDASymmetricMemoryUtils.hpp, 2.11 to 2.13). If only some ranks of a group have had a rendezvous in a smaller group before, their
counters are ahead, and every rank waits for keys that no rank writes. So each rendezvous here has a store that renames the keys,
and thereby numbers the exchanges from 0.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .agreement import history_of
from .groups import rank_in, ranks_of, store_of
from .transfer import lost


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
        """Write the value of ``key``."""
        self._store.set(self._key(key), value)
        history_of(self._group).written.append(self._key(key))

    def get(self, key: str) -> Any:
        """Return the value of ``key``, once it has been written."""
        return self._store.get(self._key(key))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all ``keys`` have been written."""
        try:
            self._store.wait([self._key(key) for key in keys], timeout or self._patience)
        except RuntimeError as error:
            ranks = ", ".join(f"rank {key.rpartition('/')[2]}" for key in keys)
            raise lost(error, f"{ranks}, to map its memory", self._group) from error

    def _key(self, key: str) -> str:
        if found := re.fullmatch(r"(.*/\d+)/(\d+)", key):
            return f"{self.name}/{self._numbers[found[1]]}/{found[2]}"
        return f"{self.name}/{key}"
