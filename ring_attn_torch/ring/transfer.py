"""Transfers of arrays between the ranks of a ring: point to point, all-to-all in a group, or all-gather."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import starmap
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from . import collectives
from .groups import Group, rank_in, ranks_of

Arrays = tuple[Any, ...]


class Transfer:
    """A transfer of the works that ``start`` returns. ``wait`` returns the arriving arrays; afterwards the memory of the sent
    ones may be reused. Both raise LostRank, with the ``awaited`` ranks' names, if the transfer fails."""

    def __init__(
        self,
        arriving: Arrays,
        sent: Arrays,
        awaited: Callable[[], str] = str,
        group: Group = None,
        start: Callable[[], Iterable[Any]] = tuple,
    ) -> None:
        self._arriving, self._sent, self._awaited, self._group = arriving, sent, awaited, group
        try:
            self._works = [*start()]
        except RuntimeError as error:  # gloo detects a lost connection here
            raise lost_error(error, awaited(), group) from error

    def wait(self) -> Any:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise lost_error(error, self._awaited(), self._group) from error
        return self._arriving


class LostRank(RuntimeError):
    """The error of a transfer or rendezvous that failed because a rank has died, stopped, or raised an error of its own."""


def lost_error(error: RuntimeError, awaited: str, group: Group) -> LostRank:
    """Return the error of a failed transfer, which names the ``awaited`` ranks: gloo's ``error`` names at most an address."""
    said = str(error).strip().partition("\n")[0]
    return LostRank(
        f"rank {rank_in(group)} lost the ring while it waited for {awaited}: one of them has died, stopped, or raised an error "
        f"of its own. The rank whose log ends first, without this message, is where to look. ({said})"
    )


def _neighbours(to: int, from_: int, group: Group) -> str:
    """Return a phrase that names the ranks that this rank waits for in a hop: ``from_``, which sends to it, and ``to``."""
    return f"{_name_rank(from_, group)}, which sends to it" + (
        ", and takes what it sends" if to == from_ else f", and {_name_rank(to, group)}, which takes what it sends"
    )


def _others(ranks: Sequence[int], group: Group) -> str:
    """Return a phrase that names the ranks that an all-to-all or all-gather waits for."""
    return f"{', '.join(_name_rank(rank, group) for rank in ranks if rank != rank_in(group))}, with which it exchanges arrays"


def _name_rank(rank: int, group: Group) -> str:
    """Return the name of a rank of the ring, such as "rank 1". Add the global rank of torch.distributed if it differs."""
    everywhere = rank if group is None else dist.get_global_rank(group, rank)
    return f"rank {rank}" if everywhere == rank else f"rank {rank} (process {everywhere} of torch.distributed)"


def send(arrays: Arrays, hop: int, group: Group, ranks: int | None = None) -> Transfer:
    """Send ``arrays``, in one batch without None, as ``swap`` does; 0 hops send nothing."""
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
    return Transfer(arriving, sent, lambda: _neighbours(to, from_, group), group, lambda: _batch(operations, group))


def _batch(operations: Sequence[dist.P2POp], group: Group) -> Iterable[Any]:
    """Start the operations in one batch. Raise ValueError if gloo would have to send tensors of a GPU: it ends the process."""
    if not operations:
        return ()
    device = operations[0].tensor.device.type
    if device != "cpu" and f"{device}:gloo" in dist.get_backend_config(group).split(","):
        raise ValueError(
            "this group is served by gloo, which sends no tensor of a GPU from rank to rank: "
            'call init_process_group("nccl"), or "cpu:gloo,cuda:nccl", and give each process a GPU of its own'
        )
    return dist.batch_isend_irecv([*operations])


_connected: WeakSet[dist.ProcessGroup] = WeakSet()


def connect(group: Group, device: torch.device) -> None:
    """Create the NCCL communicator of ``group`` by one all-reduce: a first batch of sends between only some ranks would hang."""
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
    return Transfer(arriving, sent, lambda: _others(ranks, group), group, lambda: _batch(operations, group))


def send_parts(sent: Arrays, counts: Sequence[int], arriving: Arrays, sizes: Sequence[int], group: Group) -> Transfer:
    """Send ``counts[i]`` rows of each array to rank i and receive ``sizes[i]`` rows from it, in order; both 0 for this rank."""
    meets = [peer for peer in range(len(counts)) if counts[peer] or sizes[peer]]
    pairs = [(x, there) for x, there in zip(sent, arriving, strict=True) if x is not None]
    swapped = lambda x, there: dist.all_to_all_single(there[: sum(sizes)], x, [*sizes], [*counts], group, async_op=True)
    return Transfer(arriving, sent, lambda: _others(meets, group), group, lambda: starmap(swapped, pairs))


def all_gather(arrays: Arrays, group: Group) -> Transfer:
    """Gather each array from all ranks, with one all-gather for each array. Each result is [ranks ...], in rank order."""
    ranks = ranks_of(group)
    sent = _contiguous(arrays)
    arriving: Arrays = tuple([x if x is None else x.new_empty(ranks, *x.shape) for x in sent])
    pairs = [(x, there.flatten(0, 1)) for x, there in zip(sent, arriving, strict=True) if x is not None and x.numel()]
    gathered = lambda x, there: collectives.all_gather_single(there, x, group=group, async_op=True)
    return Transfer(arriving, sent, lambda: _others(range(ranks), group), group, lambda: starmap(gathered, pairs))


def _contiguous(arrays: Arrays) -> Arrays:
    return tuple([x if x is None else x.contiguous() for x in arrays])


def _alike(arrays: Arrays) -> Arrays:
    return tuple([x if x is None else torch.empty_like(x) for x in arrays])
