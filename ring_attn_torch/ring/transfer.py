"""Transfers of arrays between the ranks of a ring: point to point, all-to-all in a group, or all-gather."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from .groups import Group, rank_in, ranks_of

Arrays = tuple[Any, ...]


class Transfer:
    """A transfer in flight. ``wait`` returns the arriving arrays; afterwards the memory of the sent ones may be reused."""

    def __init__(self, arriving: Arrays, sent: Arrays, awaited: Callable[[], str] = str, group: Group = None) -> None:
        self.works: list[Any] = []
        self._arriving, self._sent = arriving, sent
        self._awaited, self._group = awaited, group

    def wait(self) -> Any:
        """Wait for the arriving arrays and return them. Raise LostRank, with the awaited ranks' names, if the transfer fails."""
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise self.lost(error) from error
        return self._arriving

    def lost(self, error: RuntimeError) -> LostRank:
        """Return the error that names the ranks that this transfer waited for."""
        return lost(error, self._awaited(), self._group)


class LostRank(RuntimeError):
    """The error of a transfer or rendezvous that failed because a rank has died, stopped, or raised an error of its own."""


def lost(error: RuntimeError, awaited: str, group: Group) -> LostRank:
    """Return the error of a failed transfer, which names the ``awaited`` ranks: gloo's ``error`` names at most an address."""
    said = str(error).strip().partition("\n")[0]
    return LostRank(
        f"rank {rank_in(group)} lost the ring while it waited for {awaited}: one of them has died, stopped, or raised an error "
        f"of its own. The rank whose log ends first, without this message, is where to look. ({said})"
    )


def _neighbours(to: int, from_: int, group: Group) -> str:
    """Return a phrase that names the ranks that this rank waits for in a hop: ``from_``, which sends to it, and ``to``."""
    return f"{_named(from_, group)}, which sends to it" + (
        ", and takes what it sends" if to == from_ else f", and {_named(to, group)}, which takes what it sends"
    )


def _others(ranks: Sequence[int], group: Group) -> str:
    """Return a phrase that names the ranks that an all-to-all or all-gather waits for."""
    return f"{', '.join(_named(rank, group) for rank in ranks if rank != rank_in(group))}, with which it exchanges arrays"


def _named(rank: int, group: Group) -> str:
    """Return the name of a rank of the ring, such as "rank 1". Add the global rank of torch.distributed if it differs."""
    everywhere = rank if group is None else dist.get_global_rank(group, rank)
    return f"rank {rank}" if everywhere == rank else f"rank {rank} (process {everywhere} of torch.distributed)"


def send(arrays: Arrays, hop: int, group: Group) -> Transfer:
    """Send ``arrays``, in one batch without None, to the rank ``hop`` ranks after this, and receive from ``hop`` before. 0 sends
    nothing."""
    return send_inside(arrays, hop, ranks_of(group), group)


def send_inside(arrays: Arrays, hop: int, ranks: int, group: Group) -> Transfer:
    """Send ``arrays`` as ``send`` does, but within groups of ``ranks`` consecutive ranks, each of which is a ring of its own."""
    if hop == 0:
        return Transfer(arrays, arrays)
    sent = _contiguous(arrays)
    return swap(sent, _alike(sent), hop, group, ranks)


def swap(sent: Arrays, arriving: Arrays, hop: int, group: Group, ranks: int | None = None) -> Transfer:
    """Send ``sent`` to the rank ``hop`` ranks after this, and receive ``arriving`` from that ``hop`` before; all arrays are
    contiguous. ``ranks``: the number of consecutive ranks that form a ring; None: the whole group."""
    ranks = ranks_of(group) if ranks is None else ranks
    rank = rank_in(group)
    place = rank % ranks
    first = rank - place
    to, from_ = first + (place + hop) % ranks, first + (place - hop) % ranks
    operations = [dist.P2POp(dist.isend, x, group=group, group_peer=to) for x in sent if x is not None]
    operations += [dist.P2POp(dist.irecv, x, group=group, group_peer=from_) for x in arriving if x is not None]
    return _started(operations, Transfer(arriving, sent, lambda: _neighbours(to, from_, group), group))


_connected: WeakSet[dist.ProcessGroup] = WeakSet()


def connect(group: Group, device: torch.device) -> None:
    """Run one all-reduce over ``group``, once, to create its NCCL communicator. All ranks must join a group's first call: a batch
    of sends and receives between only some would hang. gloo needs no communicator."""
    if group is not None and device.type != "cpu" and group not in _connected:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        _connected.add(group)


def exchange(arrays: Arrays, first: int, group: Group) -> Transfer:
    """Exchange ``x[i]`` of each array ``x`` [n ...] with rank ``first + i``. All n ranks from ``first`` on make the same call."""
    rank, sent = rank_in(group), _contiguous(arrays)
    arriving = _alike(sent)
    pairs = [(x, there) for x, there in zip(sent, arriving, strict=True) if x is not None and x.numel()]
    ranks = range(first, first + max((len(x) for x, _ in pairs), default=0))
    operations = []
    for i, peer in enumerate(ranks):
        if peer == rank:
            for x, there in pairs:
                there[i].copy_(x[i])
        else:
            operations += [dist.P2POp(dist.isend, x[i], group=group, group_peer=peer) for x, _ in pairs]
            operations += [dist.P2POp(dist.irecv, there[i], group=group, group_peer=peer) for _, there in pairs]
    return _started(operations, Transfer(arriving, sent, lambda: _others(ranks, group), group))


def send_parts(sent: Arrays, counts: Sequence[int], arriving: Arrays, sizes: Sequence[int], group: Group) -> Transfer:
    """Send ``counts[i]`` rows of each array to rank i and receive ``sizes[i]`` rows from it, in order; both 0 for this rank."""
    meets = [peer for peer in range(len(counts)) if counts[peer] or sizes[peer]]
    transfer = Transfer(arriving, sent, lambda: _others(meets, group), group)
    try:
        for x, there in zip(sent, arriving, strict=True):
            if x is not None:
                work = dist.all_to_all_single(there[: sum(sizes)], x, [*sizes], [*counts], group, async_op=True)
                transfer.works.append(work)
    except RuntimeError as error:  # gloo detects a lost connection here
        raise transfer.lost(error) from error
    return transfer


def all_gather(arrays: Arrays, group: Group) -> Transfer:
    """Gather each array from all ranks, with one all-gather for each array. Each result is [ranks ...], in rank order."""
    ranks = ranks_of(group)
    sent = _contiguous(arrays)
    arriving: Arrays = tuple([x if x is None else x.new_empty(ranks, *x.shape) for x in sent])
    transfer = Transfer(arriving, sent, lambda: _others(range(ranks), group), group)
    try:
        for x, there in zip(sent, arriving, strict=True):
            if x is not None and x.numel():
                transfer.works.append(dist.all_gather_into_tensor(there.flatten(0, 1), x, group=group, async_op=True))
    except RuntimeError as error:
        raise transfer.lost(error) from error
    return transfer


def _contiguous(arrays: Arrays) -> Arrays:
    """Return the ``arrays`` as contiguous arrays to send. None stays None."""
    return tuple([x if x is None else x.contiguous() for x in arrays])


def _alike(arrays: Arrays) -> Arrays:
    """Return uninitialized receive buffers with the shapes and dtypes of ``arrays``. None stays None."""
    return tuple([x if x is None else torch.empty_like(x) for x in arrays])


def _started(operations: list[dist.P2POp], transfer: Transfer) -> Transfer:
    """Start the ``operations`` in one batch, add them to ``transfer.works``, and return ``transfer``."""
    try:
        transfer.works += dist.batch_isend_irecv(operations) if operations else []
    except RuntimeError as error:  # gloo detects a lost connection here
        raise transfer.lost(error) from error
    return transfer
