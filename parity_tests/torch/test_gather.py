"""gather and gather_token in PyTorch: compiled, and refused on every rank."""

from __future__ import annotations

import pytest
import torch

from ring_attn_torch import gather, gather_token

from ..support.spawn import PerRank
from .models import Group, rank_in


@pytest.mark.exhaustive
@pytest.mark.slow
def test_gather_compiles_as_one_graph(gloo):
    assert gloo(2, compiled_on_rank) == [True, True]


def compiled_on_rank(group: Group) -> bool:
    objective = lambda x: (gather(x, group=group).sin() + gather_token(x, group=group)[:, None]).sum()
    gradients = []
    for function in (objective, torch.compile(objective, fullgraph=True, backend="aot_eager")):
        x = (torch.arange(8.0).reshape(1, 4, 2) * (1 + rank_in(group))).requires_grad_()
        gradients += torch.autograd.grad(function(x), x)
    return torch.equal(*gradients)


def test_shards_that_differ_are_refused_on_every_rank(gloo):
    gloo.refuse(r"disagree on x_shape: \[2, 4\] on rank 0, \[2, 6\] on rank 1", 2, uneven_on_rank, PerRank(4, 6))


def uneven_on_rank(group: Group, tokens: int) -> None:
    gather(torch.ones(2, tokens), group=group)
