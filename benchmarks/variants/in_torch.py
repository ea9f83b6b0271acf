"""The training in PyTorch: one process per rank."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ring_attn_torch import DilatedRingAttention, RingAttention, SummaryAttention, from_numpy, loss, sum_gradients, to_numpy
from ring_attn_torch.layers.block import SwiGLU
from ring_attn_torch.layers.parts import RMSNorm

from . import problem as recipe
from .problem import Problem

LAYERS = {"exact": RingAttention, "dilated": DilatedRingAttention, "summary": SummaryAttention}


class Block(nn.Module):
    """A block ``x += attention(norm(x)); x += mlp(norm(x))`` with one of the three attentions."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        given: dict[str, Any] = {"layout": "contiguous"} if variant == "exact" else recipe.VARIANTS[variant]
        self.attention_norm = RMSNorm(recipe.DIM)
        self.attention = LAYERS[variant](recipe.DIM, recipe.HEADS, kv_heads=recipe.KV_HEADS, **given)
        self.mlp_norm = RMSNorm(recipe.DIM)
        self.mlp = SwiGLU(recipe.DIM, recipe.HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """A language model, bytes [b s] -> logits [b s 256], with the head tied to the embedding."""

    def __init__(self, variant: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, recipe.DIM)
        self.blocks = nn.ModuleList(Block(variant) for _ in range(recipe.DEPTH))
        self.norm = RMSNorm(recipe.DIM)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed.weight)


def run(given: Problem, device: torch.device) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = Model(given.variant)
    from_numpy(model, recipe.first_weights(to_numpy(model)))
    optimizer = torch.optim.AdamW(model.parameters(), recipe.LEARNING_RATE, recipe.BETAS, recipe.EPS, recipe.WEIGHT_DECAY)
    rank = dist.get_rank()
    losses, began = [], time.perf_counter()
    for step in range(given.steps):
        ids, labels = (torch.from_numpy(x).long().chunk(given.ranks, 1)[rank] for x in recipe.batch(step, given.tokens))
        value = loss(model(ids), labels)
        optimizer.zero_grad()
        value.backward()
        sum_gradients(model)
        optimizer.step()
        losses.append(value.item())
    return {"losses": losses, "seconds": time.perf_counter() - began}
