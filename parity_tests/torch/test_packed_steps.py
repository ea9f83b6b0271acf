"""Ten updates of a policy on packed rows of any lengths, by the functions that docs/other_trainers.md names for verl."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ring_attn_torch import functional, gather, sum_gradients, to_layout, token_log_probs

from ..support.models import Arrays, apart
from .models import Group, gradients, rank_in, ranks_of

VOCAB, DIM, HEADS, KV_HEADS, LENGTH, LAYOUT = 31, 24, 4, 2, 53, "zigzag"
ENDS = [[0, 9, 10, 31, 53], [0, 23, 53]]
"""cu_seqlens of the packed rows, which the steps take in turn."""


class Policy(nn.Module):
    """Two layers of attention and a head. Its ``attend`` takes q, k, v [tokens, heads, dim of a head]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB, bias=False)
        self.qkv = nn.ModuleList(nn.Linear(DIM, DIM + 2 * DIM // HEADS * KV_HEADS) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, ids: Tensor, positions: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        x = self.embed(ids) + torch.sin(positions[:, None] * torch.arange(1, DIM + 1) / DIM)
        for qkv, out in zip(self.qkv, self.out, strict=True):
            heads = qkv(F.layer_norm(x, [DIM])).view(len(x), -1, DIM // HEADS)
            x = x + out(attend(*heads.split([HEADS, KV_HEADS, KV_HEADS], 1)).reshape(len(x), DIM)).tanh()
        return x


class Row(NamedTuple):
    """A packed row: document i has the tokens from ``ends[i]`` to ``ends[i + 1]``; the last token of each has no label."""

    ends: Tensor
    documents: Tensor
    positions: Tensor
    ids: Tensor
    labels: Tensor


def row_of(step: int) -> Row:
    ends = torch.tensor(ENDS[step % 2], dtype=torch.int32)
    documents = torch.repeat_interleave(torch.arange(len(ends) - 1), ends.diff())
    positions = torch.arange(LENGTH) - ends[documents]
    ids = torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(step))
    return Row(ends, documents, positions, ids, torch.where(positions.roll(-1) > 0, ids.roll(-1), -100))


def dense(model: Policy, row: Row) -> Tensor:
    """The log-probabilities of the labels, by torch's attention with a dense mask and all logits."""
    mask = (row.documents[:, None] == row.documents) & torch.ones(LENGTH, LENGTH).tril().bool()

    def attend(*qkv: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in qkv)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    return -F.cross_entropy(model.head(model(row.ids, row.positions, attend)), row.labels, reduction="none")


def over_a_ring(model: Policy, row: Row, group: Group) -> Tensor:
    """The same of the whole row on every rank, by functions of this library."""
    ranks, rank, longest = ranks_of(group), rank_in(group), int(row.ends.diff().max())
    own = lambda x, pad=0: to_layout(x[None], LAYOUT, ranks, pad_value=pad).chunk(ranks, 1)[rank]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ring: Any = {"group": group, "layout": LAYOUT, "length": LENGTH}
        return functional.flash_attn_varlen_func(q, k, v, row.ends, row.ends, longest, longest, causal=True, **ring)

    hidden = model(own(row.ids)[0], own(row.positions)[0], attend)
    shard: Any = token_log_probs(hidden[None], own(row.labels, -100), head=model.head.weight, chunk=7)
    return gather(shard, group=group, layout=LAYOUT, length=LENGTH)[0]


def updated(group: Group, alone: bool = False) -> tuple[list[float], list[Arrays]]:
    """The losses and gradients of ten clipped policy updates; ``alone``: without a function of this library."""
    torch.set_grad_enabled(True)
    first, model = Policy(), Policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
    losses, steps = [], []
    for step in range(10):
        row = row_of(step)
        log_probs_of = lambda policy, row=row: dense(policy, row) if alone else over_a_ring(policy, row, group)
        drawn, noise = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(100 + step))
        advantages = drawn - 0.3  # of one sign more, so that the loss does not cancel
        with torch.no_grad():
            old = log_probs_of(first) + 0.1 * noise
        ratio = (log_probs_of(model) - old).exp()
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.9, 1.1) * advantages)[row.labels >= 0].mean()
        (loss / ranks_of(group)).backward()  # every rank has the whole loss
        if not alone:
            sum_gradients(model, group)
        losses.append(loss.item())
        steps.append({name: x.copy() for name, x in gradients(model).items()})
        optimizer.step()
        optimizer.zero_grad()
    return losses, steps


def test_ten_updates_on_packed_rows_are_those_of_one_process_with_dense_masks(gloo):
    losses, steps = updated(None, alone=True)
    for got, got_steps in gloo(4, updated):
        assert np.abs(np.divide(got, losses) - 1).max() < 1e-5
        assert max(map(apart, got_steps, steps)) < 1e-5
