"""Generation in PyTorch, one process per rank. Imported only if PyTorch is used."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ring_attn_torch import load_llama, load_weights

from ..processes import Report
from ..train.torch_ranks import device_of, member, report_errors
from .settings import GenerateSettings


def work(report: Report, rank: int, settings: GenerateSettings, ids: list[int], store: str) -> None:
    """Generate as one rank; rank 0 reports progress and tokens. ``store``: path of the file by which the ranks meet."""
    if dist.is_torchelastic_launched():
        report("mistake", "torchrun has started this command, which starts its own processes: run it once, with --ranks")
        return
    device = device_of(rank, settings.ranks)
    if device.type == "cpu" and settings.ranks > 1:
        torch.set_num_threads(1)
    callbacks: dict[str, Any] = {}
    if rank == 0:
        callbacks["on_token"] = lambda request, token: report("token", token)
        callbacks["progress"] = lambda done, total: report("prefilled", (done, total))
    with member(device, rank, settings.ranks, store), report_errors(report):
        with device:
            load = load_llama if settings.llama else load_weights
            model = load(settings.weights, dtype=settings.dtype, group=dist.group.WORLD)
        if rank == 0:
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
            report("loaded", f"{sum(p.numel() for p in model.parameters()):,} weights on {settings.ranks} x {name}")
        model.generate([ids], **settings.arguments, **callbacks)
