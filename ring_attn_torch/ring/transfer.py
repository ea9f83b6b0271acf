"""Transfers of arrays between the ranks of a ring, each one batched send and receive."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .groups import Group, rank_in, ranks_of

Arrays = tuple[Any, ...]


class Transfer:
    """A transfer in flight. ``wait`` returns the arrays that arrive; from then on the memory of the sent ones may be reused.

    ``hop``: the distance in ranks, used by the error of a failed transfer.
    """

    def __init__(self, arriving: Arrays, works: list[dist.Work], sent: Arrays, hop: int = 0, group: Group = None) -> None:
        self._arriving, self._works, self._sent = arriving, works, sent
        self._hop, self._group = hop, group

    def wait(self) -> Any:
        """Return the arrays that arrive. Raise RuntimeError, which names the neighbours, if a transfer fails."""
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise lost(error, self._hop, self._group) from error
        return self._arriving


def lost(error: RuntimeError, hop: int, group: Group) -> RuntimeError:
    """Return the error of a failed transfer, which names the ranks this one waited for and the likely causes.

    The ``error`` of gloo names at most an address, not a rank; its first line is quoted at the end.
    """
    rank, ranks = rank_in(group), ranks_of(group)
    to, from_ = (rank + hop) % ranks, (rank - hop) % ranks
    who = f"{_named(from_, group)}, which sends to it" + (
        ", and takes what it sends" if to == from_ else f", and {_named(to, group)}, which takes what it sends"
    )
    said = str(error).strip().partition("\n")[0]
    return RuntimeError(
        f"rank {rank} lost the ring while it waited for {who}: one of them has died, stopped, or raised an error of its own. The "
        f"rank whose log ends first, without this message, is where to look. ({said})"
    )


def _named(rank: int, group: Group) -> str:
    """Return the name of a rank of the ring, with its global rank if that differs."""
    everywhere = rank if group is None else dist.get_global_rank(group, rank)
    return f"rank {rank}" if everywhere == rank else f"rank {rank} (process {everywhere} of torch.distributed)"


def send(arrays: Arrays, hop: int, group: Group) -> Transfer:
    """Send ``arrays`` to the rank ``hop`` after this one, and receive those of the rank ``hop`` before it.

    All arrays that are not None go in one batch. A hop of 0 sends nothing.
    """
    if hop == 0:
        return Transfer(arrays, [], arrays)
    rank, ranks = rank_in(group), ranks_of(group)
    to, from_ = (rank + hop) % ranks, (rank - hop) % ranks
    sent = tuple(x if x is None else x.contiguous() for x in arrays)
    arriving = tuple(x if x is None else torch.empty_like(x) for x in sent)
    operations = [dist.P2POp(dist.isend, x, group=group, group_peer=to) for x in sent if x is not None]
    operations += [dist.P2POp(dist.irecv, x, group=group, group_peer=from_) for x in arriving if x is not None]
    try:
        works = dist.batch_isend_irecv(operations)
    except RuntimeError as error:  # gloo detects a lost connection here
        raise lost(error, hop, group) from error
    return Transfer(arriving, works, sent, hop, group)
