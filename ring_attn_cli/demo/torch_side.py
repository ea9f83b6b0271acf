"""The demo in PyTorch: one gloo process per rank. Imported in those processes only."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from ring_attn_torch import shard_batch

from ..compare.torch_side import TorchWorker
from ..processes import Report
from ..train.torch_ranks import CPU, member
from ..train.torch_side import RankPlace, TorchTrainer
from . import exactness, training
from .exactness import PARTS, DemoInputs, DemoResult
from .settings import DemoSettings


def work(report: Report, rank: int, settings: DemoSettings, inputs: DemoInputs, store: str) -> None:
    """Compute the demo's attention and training as one rank; rank 0 reports. ``store``: file by which the ranks meet."""
    tell = report if rank == 0 else lambda kind, data: None
    with member(CPU, rank, settings.ranks, store, settings.patience):
        world: Any = dist.group.WORLD
        groups: dict[int, Any] = {1: dist.new_group([0]), settings.ranks: world}
        worker = TorchWorker(rank, groups, CPU, cores=1)  # the other cores are JAX's and the truth's
        for part, order in exactness.orders(settings, "torch").items():
            if rank < order.ranks:
                tell("stage", f"attention {PARTS[part]}")
                began, outcome = time.perf_counter(), worker.prepare(order, inputs.of_attention)
                outcomes = [outcome] * order.ranks
                dist.all_gather_object(outcomes, outcome, groups[order.ranks])
                tell(part, DemoResult.of(order, outcomes, began))
        tell("stage", "training")
        trainer = TorchTrainer(training.config(settings), RankPlace(world, world, 0, CPU))
        shard = lambda text: shard_batch(torch.from_numpy(text), settings.layout, settings.ranks, rank)
        training.train(tell, settings, lambda number, text: trainer.step(number, [shard(text)]))
