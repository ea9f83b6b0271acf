"""The calls in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_attn_torch import RingTransformer, loss

from ..support.turns import peak_bytes
from .problem import VOCAB, config_of

DEVICE = "cuda"


class Cell(NamedTuple):
    """A call, and a function that measures its peak memory in bytes."""

    work: Callable[[], object]
    peak: Callable[[], int]


def cell(part: str, tokens: int, chunk: int | None) -> Cell:
    work = _loss(tokens, chunk) if part == "loss" else _layers(part, tokens, chunk)
    return Cell(work, partial(peak_bytes, work))


def _layers(part: str, tokens: int, chunk: int | None) -> Callable[[], object]:
    config = config_of(chunk)
    with torch.device(DEVICE):
        torch.manual_seed(0)
        model = RingTransformer.from_config(config, activations=part.partition(", ")[2] or "keep")
        x = torch.randn(1, tokens, config.dim, dtype=torch.bfloat16, requires_grad=True)
        dout = torch.randn(1, tokens, config.dim, dtype=torch.bfloat16)
        ids = torch.randint(config.vocab, (1, tokens))
    if part == "mlp":
        mlp: Any = model.blocks[0].mlp
        return lambda: torch.autograd.grad(mlp(x), [x, *mlp.parameters()], dout)
    weights = list(model.blocks.parameters())
    return lambda: torch.autograd.grad(model(ids, return_hidden=True), weights, dout)


def _loss(tokens: int, chunk: int | None) -> Callable[[], object]:
    with torch.device(DEVICE):
        torch.manual_seed(0)
        hidden = torch.randn(1, tokens, config_of(None).dim, dtype=torch.bfloat16, requires_grad=True)
        head = (0.02 * torch.randn(VOCAB, hidden.shape[-1])).requires_grad_()
        labels = torch.randint(VOCAB, (1, tokens))

    def value() -> Tensor:
        if chunk is None:
            return loss(hidden @ head.to(hidden.dtype).T, labels)
        return loss(hidden, labels, head=head, chunk=chunk)

    return lambda: torch.autograd.grad(value(), [hidden, head])
