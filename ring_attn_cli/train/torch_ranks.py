"""Devices and default process group of PyTorch ranks that a command or torchrun starts. Imported only if PyTorch is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ..processes import Report
from . import torchrun

CPU = torch.device("cpu")


def device_of(rank: int, ranks: int) -> torch.device:
    """Select and return this rank's GPU if the machine has at least ``ranks`` GPUs, else return the CPU."""
    if torch.cuda.is_available() and torch.cuda.device_count() >= ranks:
        torch.cuda.set_device(rank)
        return torch.device("cuda", rank)
    return CPU


def backend_of(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


@contextmanager
def member(device: torch.device, rank: int, ranks: int, store: str, patience: float | None = None) -> Iterator[None]:
    """Join the default process group, and leave it at the end, but not after an error, for leaving waits for other ranks."""
    timeout = None if patience is None else timedelta(seconds=patience)
    dist.init_process_group(backend_of(device), init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timeout)
    yield
    dist.destroy_process_group()


def join_launched(device: torch.device) -> None:
    """Join torchrun's default group. The restart's number prefixes keys: the store may hold addresses of dead processes."""
    timeout = timedelta(minutes=30)
    restart = torchrun.restart_number()
    if restart is None:
        dist.init_process_group(backend_of(device), timeout=timeout)
        return
    store, rank, ranks = next(rendezvous("env://", timeout=timeout))
    store = PrefixStore(f"restart {restart}", store)
    dist.init_process_group(backend_of(device), timeout=timeout, store=store, rank=rank, world_size=ranks)


@contextmanager
def report_errors(report: Report) -> Iterator[None]:
    """Report a ValueError of the ``with`` block as a "mistake" message, and suppress it. All ranks must raise the error."""
    try:
        yield
    except ValueError as error:
        report("mistake", str(error))
