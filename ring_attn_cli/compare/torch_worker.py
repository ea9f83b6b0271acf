"""A worker process in PyTorch: one rank of the comparison's rings, by gloo on CPUs and NCCL on GPUs."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import ring_attn_torch

from ..processes import Worker
from ..train.torch_ranks import CPU, member
from .messages import Change, Outcome, Request, WorkerSettings, cut
from .oracles import GlobalArrays, Oracle
from .worker import CAST, Arrays, Call, CallRunner, Loaded, Prepared, load, make_importable, serve


def work(worker: Worker, rank: int, settings: WorkerSettings) -> None:
    """Report this process's devices, then answer requests as one rank; stop after the report if GPUs are too few."""
    devices, kind, device = settings.most, "cpu", CPU
    if settings.device == "gpu":
        devices = torch.cuda.device_count()
        kind = torch.cuda.get_device_name(0) if devices else "none"
        if devices < settings.most:
            worker("ready", (rank, {"devices": devices, "kind": kind}))
            return
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
    patience = 2 * settings.patience  # the parent gives up first, with a better message
    with member(device, rank, settings.most, settings.store, patience):
        groups = {ring: dist.new_group(range(ring), timeout=timedelta(seconds=patience)) for ring in settings.rings}
        make_importable(settings.folder)
        worker("ready", (rank, {"devices": devices, "kind": kind}))
        serve(worker, rank, TorchRunner(rank, groups, device), settings.patience)


class TorchRunner(CallRunner):
    """The prepared calls of one rank. ``groups``: process groups by their number of ranks."""

    def __init__(self, rank: int, groups: dict[int, Any], device: torch.device) -> None:
        super().__init__()
        self._rank, self._groups, self._device = rank, groups, device
        self._threads = torch.get_num_threads()  # those of OMP_NUM_THREADS, else a thread for each core

    def build(self, request: Request, oracle: Oracle, inputs: GlobalArrays) -> Prepared:
        """Prepare this rank's results and gradients; only rank 0 has replicated results among its outcome."""
        case, plan, ring = request.case, request.case.plan(request.ranks), {"group": self._groups[request.ranks]}
        self._share_cores(request.ranks)
        function = request.build(Call(case, plan, request.user, ring_attn_torch, ring, _bind, ring, self._device))
        within = getattr(function, "within", nullcontext)  # a context around forward and backward

        def place(name: str, x: np.ndarray, pad: Any) -> Tensor:
            shard = torch.tensor(cut(x, plan, pad)[self._rank] if name in oracle.sharded else x).to(self._device)
            placed = shard.to(getattr(torch, case.dtype)) if name in CAST else shard
            return placed.requires_grad_(name in inputs.leaves)

        loaded = load(inputs, oracle.paddings, None, place)
        used: set[str] = set()

        def run(loaded: Loaded = loaded) -> dict[str, Tensor]:
            named, others, cotangents = loaded
            leaves = list(named.values())
            with within():
                results = function(named | others)
                ends = [name for name in cotangents if name in results and results[name].requires_grad]
                used.update(ends, {*cotangents} & {*results} - {"lse"})
                starts = [cotangents[name].to(results[name].dtype) for name in ends]
                sources = [results[name] for name in ends]
                gradients = torch.autograd.grad(sources, leaves, starts, allow_unused=True) if ends else [None] * len(leaves)
            found = {name: x.detach() for name, x in results.items()}
            pairs = zip(named, leaves, gradients, strict=True)
            found |= {"d" + name: torch.zeros_like(x) if gradient is None else gradient for name, x, gradient in pairs}
            self._synchronize()
            return found

        def outcome(change: Change | None) -> Outcome:
            results = run(load(inputs, oracle.paddings, change, place) if change else loaded)
            kept = {name: x for name, x in results.items() if self._rank == 0 or name in oracle.sharded or name[0] == "d"}
            return Outcome({name: [_numpy(x)] for name, x in kept.items()}, frozenset(used))

        return Prepared(run, outcome)

    def meet(self, request: Request) -> None:
        self._share_cores(request.ranks)
        if request.ranks > 1:
            dist.barrier(self._groups[request.ranks])
        self._synchronize()

    def memory(self, request: Request) -> int | None:
        """Return the peak memory of one run above the memory held before, in bytes; None if it cannot be measured."""
        if self._device.type == "cpu":
            return super().memory(request)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.run(request)
        return torch.cuda.max_memory_allocated() - before

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _share_cores(self, ranks: int) -> None:
        torch.set_num_threads(max(self._threads // ranks, 1))


def _bind(module: torch.nn.Module, arrays: Arrays) -> tuple[Any, Arrays]:
    """Return a function that calls ``module`` with its weights from ``arrays``, and the other arrays."""
    names = {name for name, _ in module.named_parameters()}
    weights = {name: x for name, x in arrays.items() if name in names}
    call = lambda *inputs, **options: torch.func.functional_call(module, weights, inputs, options)
    return call, {name: x for name, x in arrays.items() if name not in names}


def _numpy(x: Tensor) -> np.ndarray:
    wide = torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype
    return x.detach().to("cpu", wide).numpy()
