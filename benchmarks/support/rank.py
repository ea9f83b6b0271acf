"""A fresh process of a benchmark, a rank in PyTorch or some ranks in JAX: it calls ``run(problem, place)`` of a module."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from .process import answer, argument


def in_torch(given: dict[str, Any]) -> Any:
    """Join the group of all ranks and run on this rank's device."""
    import torch
    import torch.distributed as dist

    rank, ranks, cpu = given["rank"], given["ranks"], given["cpu"]
    device = torch.device("cpu") if cpu else torch.device("cuda", rank)
    if not cpu:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if cpu else "nccl", init_method=f"file://{given['store']}", rank=rank, world_size=ranks)
    found = _run(given, device)
    dist.destroy_process_group()
    return found


def in_jax(given: dict[str, Any]) -> Any:
    """Run on all devices; on a CPU there are as many as ranks. Several processes hold equally many devices each."""
    import jax

    processes, rank = given["processes"], given["rank"]
    each = given["ranks"] // processes
    if given["cpu"]:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", each)
    if processes > 1:
        local = None if given["cpu"] else [*range(rank * each, (rank + 1) * each)]
        jax.distributed.initialize(given["coordinator"], processes, rank, local)
    return _run(given, given["ranks"])


def _run(given: dict[str, Any], place: Any) -> Any:
    module = import_module(given["module"])
    return module.run(module.Problem(**given["problem"]), place)


def timed(step: Callable[[], float], steps: int, meet: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Return the seconds of a first step and of ``steps`` more, and all losses. ``meet``: called before each step."""
    seconds, losses = [], []
    for _ in range(1 + steps):
        meet()
        began = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - began)
    return {"first": seconds[0], "seconds": seconds[1:], "losses": losses}


if __name__ == "__main__":
    arguments = argument()
    answer((in_jax if arguments["module"].endswith("jax") else in_torch)(arguments))
