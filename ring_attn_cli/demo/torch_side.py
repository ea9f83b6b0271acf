"""The demo in PyTorch: one gloo process per rank. Imported in those processes only."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn_core.reference.oracle import Attention
from ring_attn_torch import (
    RingTransformer,
    from_layout,
    from_numpy,
    loss,
    ring_attention,
    shard_batch,
    sum_gradients,
    to_layout,
    to_numpy,
)

from ..processes import Report
from . import training
from .exactness import DemoInputs, DemoResult
from .settings import MASK, DemoSettings
from .training import DemoStep


def work(report: Report, rank: int, settings: DemoSettings, given: DemoInputs, store: str) -> None:
    """Compute the attention and the training of one rank; rank 0 reports for all."""
    torch.set_num_threads(1)
    patience = timedelta(seconds=settings.patience)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=settings.ranks, timeout=patience)
    alone = dist.new_group([0])
    tell = report if rank == 0 else lambda kind, data: None

    tell("stage", "attention over the ring")
    began = time.perf_counter()
    tell("ring", DemoResult(attention(settings, given, rank), time.perf_counter() - began))
    if rank == 0:
        tell("stage", "attention on one device")
        began = time.perf_counter()
        tell("one device", DemoResult(attention(settings, given, 0, alone), time.perf_counter() - began))
    tell("stage", "training")
    train(tell, settings, rank)
    dist.destroy_process_group()


def attention(settings: DemoSettings, given: DemoInputs, rank: int, group: Any = None) -> Attention:
    """Return attention and gradients of global sequences: shard, call, run the backward, and gather."""
    ranks, layout, tokens = dist.get_world_size(group), settings.layout, settings.tokens
    q, k, v, dout, dlse = (to_layout(torch.from_numpy(x), layout, ranks).chunk(ranks, 1)[rank].contiguous() for x in given)
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = ring_attention(q, k, v, group=group, layout=layout, mask=MASK, length=tokens, return_lse=True)
    gradients = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))

    def gathered(x: Tensor) -> Any:
        shards = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(shards, x.detach().contiguous(), group=group)
        return from_layout(torch.cat(shards, 1), layout, ranks, tokens).numpy()

    return Attention(*map(gathered, (out, lse, *gradients)))


def train(report: Report, settings: DemoSettings, rank: int) -> None:
    """Train on consecutive stretches of text, one for each step, and report each loss.

    All ranks end with the same weights.
    """
    model = RingTransformer(**training.MODEL, layout=settings.layout, mask=MASK)
    from_numpy(model, training.weights(to_numpy(model)))
    optimizer = torch.optim.AdamW(model.parameters(), training.LEARNING_RATE, training.BETAS, training.EPS, training.WEIGHT_DECAY)
    for step in range(settings.steps):
        began = time.perf_counter()
        text = torch.from_numpy(training.batch(step, settings.tokens))
        shard = shard_batch(text, settings.layout, settings.ranks, rank)
        value = loss(model(shard.ids, shard.positions, shard.length), shard.labels)
        optimizer.zero_grad()
        value.backward()
        sum_gradients(model)
        optimizer.step()
        report("step", DemoStep(value.item(), time.perf_counter() - began))
