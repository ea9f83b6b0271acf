"""The PyTorch side of a comparison: one process per rank, gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn_core.plan.ring import RingPlan

from ..processes import Parent
from ..train.torch_ranks import CPU, member
from .cases import Case
from .measure import ResidentMemory
from .oracles import ORACLES, GlobalArrays
from .orders import Order, Outcome, WorkerSettings, cut, importable, resolve, serve

CAST = {"q", "k", "v", "x"}
"""Arrays that are cast to the case's dtype; sinks, slopes and weights keep the dtype that they are drawn in."""


class TorchCall(NamedTuple):
    """Inputs for building a variant's function on this rank. ``user``: the name of a user's own function, or None."""

    case: Case
    plan: RingPlan
    rank: int
    group: Any
    device: torch.device
    user: str | None


class ReadyVariant(NamedTuple):
    """A prepared call: ``run`` computes the results and gradients of this rank's shards; ``group``: the ring's process group."""

    run: Callable[[], dict[str, Tensor]]
    group: Any


def work(parent: Parent, rank: int, settings: WorkerSettings) -> None:
    """Report this process's devices, then execute each ``Order`` as one rank; stop after the report if GPUs are too few."""
    devices, kind = settings.most, "cpu"
    if settings.device == "gpu":
        devices = torch.cuda.device_count()
        kind = torch.cuda.get_device_name(0) if devices else "none"
        if devices < settings.most:
            parent("ready", (rank, {"devices": devices, "kind": kind}))
            return
        torch.cuda.set_device(rank)
    device = torch.device("cuda", rank) if settings.device == "gpu" else CPU
    patience = 2 * settings.patience  # the parent gives up first, with a better message
    with member(device, rank, settings.most, settings.store, patience):
        groups = {ring: dist.new_group(range(ring), timeout=timedelta(seconds=patience)) for ring in settings.rings}
        importable(settings.folder)
        parent("ready", (rank, {"devices": devices, "kind": kind}))
        serve(parent, rank, TorchWorker(rank, groups, device), settings.patience)


class TorchWorker:
    """The calls of one rank; ``prepare`` builds and runs a call, on which the other methods act.
    ``groups``: process groups by ranks. ``cores``: CPU cores that the ranks share, 0 for all that this process may use."""

    def __init__(self, rank: int, groups: dict[int, Any], device: torch.device, cores: int = 0) -> None:
        self._rank, self._groups, self._device, self._cores = rank, groups, device, cores or _cores()
        self._known: dict[Any, ReadyVariant] = {}

    def prepare(self, order: Order, inputs: GlobalArrays | None = None) -> Outcome:
        """Build the call, run it once, and return this rank's results and gradients; only rank 0 returns replicated results.
        ``inputs``: the global inputs; None: those that the oracle draws."""
        oracle, plan = ORACLES[order.oracle], order.case.plan(order.ranks)
        inputs = inputs or oracle.inputs(order.case)
        self._share_cores(order.ranks)
        group = self._groups[order.ranks]
        function = resolve(order.call)(TorchCall(order.case, plan, self._rank, group, self._device, order.user))
        dtype = getattr(torch, order.case.dtype)

        def mine(name: str, x: np.ndarray, pad: Any = 0) -> Tensor:
            shard = torch.tensor(cut(x, plan, pad)[self._rank] if name in oracle.sharded else x).to(self._device)
            return shard.to(dtype) if name in CAST else shard

        arrays = {name: mine(name, x, oracle.paddings.get(name, 0)) for name, x in inputs.arrays.items()}
        leaves = [arrays[name].requires_grad_() for name in inputs.leaves]
        cotangents = {name: mine(name, x) for name, x in inputs.cotangents.items()}
        used: set[str] = set()

        within = getattr(function, "within", nullcontext)  # a context around forward and backward

        def run() -> dict[str, Tensor]:
            with within():
                return both()

        def both() -> dict[str, Tensor]:
            results = function(arrays)
            used.update(name for name in cotangents if name in results and (name != "lse" or results[name].requires_grad))
            ends = [name for name in cotangents if name in results and results[name].requires_grad]
            starts = [cotangents[name].to(results[name].dtype) for name in ends]
            gradients = [None] * len(leaves)
            if ends:
                gradients = torch.autograd.grad([results[name] for name in ends], leaves, starts, allow_unused=True)
            found = {name: x.detach() for name, x in results.items()}
            pairs = zip(inputs.leaves, leaves, gradients, strict=True)
            return found | {"d" + name: torch.zeros_like(x) if gradient is None else gradient for name, x, gradient in pairs}

        prepared = self._known[order.key] = ReadyVariant(run, group)
        results = prepared.run()
        whole = {name: [_numpy(x)] for name, x in results.items() if self._rank == 0 or name in oracle.sharded or name[0] == "d"}
        return Outcome(whole, frozenset(used))

    def time(self, order: Order) -> float:
        """Return the seconds of one run, forward and backward. Several ranks first meet at a barrier, which is not timed."""
        self._share_cores(order.ranks)
        prepared = self._known[order.key]
        if order.ranks > 1:
            dist.barrier(prepared.group)
        self._wait()
        began = time.perf_counter()
        prepared.run()
        self._wait()
        return time.perf_counter() - began

    def memory(self, order: Order) -> int | None:
        """Return the peak memory of one run above the memory held before, in bytes; None if it cannot be measured."""
        run = self._known[order.key].run
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            self._wait()
            return torch.cuda.max_memory_allocated() - before
        memory = ResidentMemory()
        run()
        return memory.peak()

    def forget(self, order: Order) -> None:
        self._known.pop(order.key, None)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _share_cores(self, ranks: int) -> None:
        torch.set_num_threads(max(self._cores // ranks, 1))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _numpy(x: Tensor) -> np.ndarray:
    wide = torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype
    return x.detach().to("cpu", wide).numpy()
