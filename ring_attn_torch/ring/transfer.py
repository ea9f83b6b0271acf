"""Arrays on their way: one batched send and receive."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .groups import Group, rank_in, ranks_of

Arrays = tuple[Any, ...]


class Transfer:
    """Arrays on their way: ``wait`` returns what arrives, and what was sent may be reused from then on."""

    def __init__(self, arriving: Arrays, works: list[dist.Work], sent: Arrays) -> None:
        self._arriving, self._works, self._sent = arriving, works, sent

    def wait(self) -> Any:
        for work in self._works:
            work.wait()
        return self._arriving


def send(arrays: Arrays, hop: int, group: Group) -> Transfer:
    """What the rank ``hop`` before this one holds, while this rank's goes to the one ``hop`` after. A hop of 0 sends nothing.

    All arrays that are not None go in one batch.
    """
    if hop == 0:
        return Transfer(arrays, [], arrays)
    rank, ranks = rank_in(group), ranks_of(group)
    to, from_ = (rank + hop) % ranks, (rank - hop) % ranks
    sent = tuple(x if x is None else x.contiguous() for x in arrays)
    arriving = tuple(x if x is None else torch.empty_like(x) for x in sent)
    operations = [dist.P2POp(dist.isend, x, group=group, group_peer=to) for x in sent if x is not None]
    operations += [dist.P2POp(dist.irecv, x, group=group, group_peer=from_) for x in arriving if x is not None]
    return Transfer(arriving, dist.batch_isend_irecv(operations), sent)
