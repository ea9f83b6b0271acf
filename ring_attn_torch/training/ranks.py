"""Checks, through the group's store, that all ranks have equal weights, seeds and arguments, and that no rank has failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ring_attn_core.model.replica_check import (
    RankDifference,
    Replica,
    array_content,
    array_kind,
    check_alike,
    check_plain,
    check_replicas,
    name_entries,
    plain_replica,
    table_digest,
    tables_from_json,
)
from ring_attn_core.validation import in_words

from ..ring.agreement import GRACE, exchange, same_error
from ..ring.groups import Group, is_dtensor, rank_in, ranks_of, ring_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

REMEDY = "Load or broadcast one rank's values, and pass the same seeds and arguments on every rank"

SHOWN = (torch.int64, torch.int32, torch.float32, torch.float64)
"""The dtypes of one-element tensors whose value an error shows, such as a seed, a count or a rate."""


def check_ranks(what: Any, group: dist.ProcessGroup | DeviceMesh | None = None) -> None:
    """Compare ``what`` between the ranks of ``group`` at the start of training. Raise ValueError on every rank if it differs.

    ``what``: an nn.Module (its parameters and buffers), a tensor, a number (also numpy's), str, bool, None, mask or Run. Dicts,
    lists and tuples of these are compared entry by entry: ``{"model": model, "dropout_seed": seed, "mask": mask}``. ``group``:
    the ranks to compare, a ring or all ranks; None is the default group. Every rank must call this function after the same number
    of ``ring_attention`` calls. In a group of one rank it only checks the types.

    Values are compared bit for bit, arrays by 64-bit digests: NaN equals NaN of the same bits, but 0.0 differs from -0.0. Types,
    dtypes, shapes and parameters' ``requires_grad`` are compared too; devices and the order of names are not. A weight that a
    module holds under two names is compared once.

    For a DTensor (FSDP2, tensor parallelism), dtype, global shape, mesh shape and placements are compared between all ranks.
    A local shard is compared only between the ranks that hold replicas of it: these ranks have equal coordinates on all mesh
    dims except those that replicate the DTensor. Shards that are plain tensors, such as FSDP1's, are compared as if they were
    replicas, so they are reported as different.

    Raise ValueError, the same on every rank, if an entry cannot be compared or entries differ. The error names up to 8 entries,
    and shows their values or digests. Raise RuntimeError after the group's timeout if a rank does not call this function. Each
    rank copies every tensor to the host, and sends one digest of all entries through the group's store. If the digests differ,
    or if DTensors are sharded, each rank also sends one line for every entry.
    """
    ring = ring_of(group)
    with same_error(ring):
        entries = name_entries(_entries(what, ""))
        if ring is None or ranks_of(ring) == 1:
            return
        table = {name: [_replica(("rank", rank_in(ring)), x)] for name, x in entries.items()}
    if len(set(exchange("check_ranks", table_digest(table), ring))) > 1:
        check_replicas(tables_from_json(exchange("check_ranks", table, ring)), "rank", REMEDY)


def _entries(what: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(what, nn.Module):
        inside: Any = [*what.named_parameters(), *what.named_buffers()]
    elif isinstance(what, Mapping):
        inside = what.items()
    elif isinstance(what, list | tuple):
        inside = zip(getattr(what, "_fields", range(len(what))), what, strict=True)
    else:
        _check(name or "what", what)
        yield name or "what", what
        return
    for key, x in inside:
        if not isinstance(key, str | int):
            raise ValueError(f"{name or 'what'} has a key of type {type(key).__name__}: entries are named by str or int")
        yield from _entries(x, f"{name}.{key}" if name else str(key))


def _check(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        check_plain(name, x, "an nn.Module, a tensor")
        return
    if is_lazy(x) or x.is_meta:
        raise ValueError(f"{name} has no values yet: give it some, it is {'lazy' if is_lazy(x) else 'on the meta device'}")
    wraps = is_traceable_wrapper_subclass(x) and not is_dtensor(x)
    if wraps or x.layout != torch.strided or x.is_nested or x.is_quantized:
        raise ValueError(f"{name} is a {type(x).__name__} of layout {x.layout}: pass the dense tensors that it is made of")


def _replica(owner: tuple[str, int], x: Any) -> Replica:
    if not isinstance(x, Tensor):
        return plain_replica(owner, x)
    kind = "Tensor" if not isinstance(x, nn.Parameter) else "Parameter" if x.requires_grad else "frozen Parameter"
    kind, part = _kind(kind, x), ""
    with torch.no_grad():
        if is_dtensor(x):
            x, part = x.to_local(), _part(x)
        flat = x.detach().resolve_conj().resolve_neg().contiguous().flatten()
        data = flat.view(torch.uint8).cpu().numpy()
        value = x.item() if x.numel() == 1 and x.dtype in SHOWN else None
    return Replica(owner, kind, array_content(data, value), part)


def _kind(kind: str, x: Tensor) -> str:
    kind = array_kind(kind, str(x.dtype).removeprefix("torch."), x.shape)
    return f"{kind} {list(x.placements)} on a mesh of {list(x.device_mesh.shape)}" if is_dtensor(x) else kind


def _part(x: DTensor) -> str:
    """Return this rank's coordinates on mesh dims that do not replicate ``x``. Ranks with equal texts hold replicas."""
    mesh, place = x.device_mesh, x.device_mesh.get_coordinate()
    if place is None:
        return "no part of it"
    cut = [dim for dim, placement in enumerate(x.placements) if not placement.is_replicate()]
    return ", ".join(f"part {place[dim]} of {mesh.size(dim)} on mesh dim {dim}" for dim in cut)


@contextmanager
def together(call: str, ring: Group) -> Iterator[list[str]]:
    """Run the block. If it fails on a rank, or texts appended to the yielded list differ, all ranks raise: see
    ``_exchange_errors``, with RankDifference for an error on some ranks alone."""
    error, alike = None, list[str]()
    try:
        yield alike
    except Exception as objection:
        error = objection
    reports = _exchange_errors(call, error, {"alike": alike}, ring, RankDifference)
    check_alike(f"what ranks have read while {call}", "rank", [", ".join(each["alike"]) for each in reports])


def _exchange_errors(
    call: str, error: Exception | None, mine: dict[str, Any], ring: Group, other: type[Exception] = ValueError
) -> list[dict[str, Any]]:
    """Return ``mine`` of all ranks, or raise the lowest failing rank's error on all. An OSError stays one; others become a
    ValueError, or ``other`` if some rank had no error. A failing rank waits 5 seconds for the others."""
    if ring is None or ranks_of(ring) == 1:
        if error is not None:
            raise error
        return [mine]
    try:
        mine = mine | {"error": error and [isinstance(error, OSError), str(error)]}
        reports = exchange(call, mine, ring, GRACE if error else None)
    except RuntimeError:
        if error is None:
            raise
        raise error from None
    errors = [each["error"] for each in reports]
    for rank, each in enumerate(errors):
        if each is not None:
            kind = OSError if each[0] else other if None in errors else ValueError
            raise kind(f"rank {rank}: {each[1]}") from error
    return reports


def check_kinds(call: str, tensors: Mapping[str, Tensor], ring: Group) -> None:
    if ring is None or ranks_of(ring) == 1:
        return
    table = {name: [Replica(("rank", rank_in(ring)), _kind("Tensor", x), "")] for name, x in tensors.items()}
    if len(set(exchange(call, table_digest(table), ring))) > 1:
        check_replicas(tables_from_json(exchange(call, table, ring)), "rank", "Make the same model on every rank")


def run_on_all(call: str, function: Callable[[], Any], ring: Group, **alike: int | str | None) -> list[Any]:
    """Return all ranks' values of ``function``, which JSON can hold. ``call`` and ``alike`` must be equal on all ranks."""
    error, value = None, None
    try:
        value = function()
    except Exception as objection:  # any exception, since the other ranks wait for this rank
        error = objection
    mine = {"value": value, "alike": {name: in_words(x) for name, x in alike.items()}}
    gathered = _exchange_errors(call, error, mine, ring)
    for name in alike:
        values = [each["alike"][name] for each in gathered]
        if len(set(values)) > 1:
            raise ValueError(f"{by_rank(name, values)}: all ranks must make the same calls")
    return [each["value"] for each in gathered]


def by_rank(name: str, values: list[Any]) -> str:
    return f"{name} is {', '.join(f'{value} on rank {rank}' for rank, value in enumerate(values))}"
