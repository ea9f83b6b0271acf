"""gather and gather_token in PyTorch: whole sequences and single tokens on every rank, and the gradients of the shards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ring_attn_torch import from_layout, gather, gather_token, to_layout

from ..support.gathered import DEALT, LENGTH, ROWS, sequence
from ..support.spawn import PerRank
from .models import Group, rank_in, ranks_of


@pytest.mark.parametrize(("ranks", "layout"), [(1, "zigzag"), (2, "contiguous"), (4, "zigzag"), (4, "striped"), (3, DEALT)])
def test_every_rank_gets_the_whole_and_its_shard_the_sum_of_the_cotangents(gloo, ranks, layout):
    x, dwhole, dtoken = sequence(ranks)
    results = gloo(ranks, gathered_on_rank, layout, x, PerRank(*dwhole), PerRank(*dtoken))
    for got in results:
        np.testing.assert_array_equal(got["whole"], x)
        np.testing.assert_array_equal(got["mask"], x > 0)
        np.testing.assert_array_equal(got["ids"], (x * 100).astype(np.int32))
        np.testing.assert_array_equal(got["last"], x[:, -1])
        np.testing.assert_array_equal(got["rows"], [x[0, 12], x[1, 3], 0 * x[2, 0]])
    back = lambda name: from_layout(torch.cat([torch.from_numpy(got[name]) for got in results], 1), layout, ranks, LENGTH)
    np.testing.assert_allclose(back("dwhole"), dwhole.sum(0), rtol=1e-6, atol=1e-6)
    expected = np.zeros_like(x)
    expected[0, 12], expected[1, 3] = dtoken.sum(0)[:2]
    np.testing.assert_allclose(back("drows"), expected, rtol=1e-6, atol=1e-6)


def gathered_on_rank(group: Group, layout: Any, x: np.ndarray, dwhole: np.ndarray, dtoken: np.ndarray) -> dict[str, np.ndarray]:
    """What padding holds is NaN, and may not matter."""
    ring: Any = {"group": group, "layout": layout, "length": LENGTH}
    mine = lambda x, pad: to_layout(x, layout, ranks_of(group), pad_value=pad).chunk(ranks_of(group), 1)[rank_in(group)]
    natural = torch.from_numpy(x)
    shard = mine(natural, torch.nan).requires_grad_()
    whole, rows = gather(shard, **ring), gather_token(shard, torch.from_numpy(ROWS), **ring)
    gradients = [torch.autograd.grad(y, shard, torch.from_numpy(dy))[0] for y, dy in ((whole, dwhole), (rows, dtoken))]
    got = {"whole": whole, "rows": rows, "dwhole": gradients[0], "drows": gradients[1]}
    got |= {"mask": gather(mine(natural > 0, False), **ring), "ids": gather(mine((natural * 100).int(), 0), **ring)}
    got |= {"last": gather_token(shard, length=LENGTH, group=group, layout=layout)}
    assert torch.equal(got["last"], gather_token(shard, LENGTH - 1, **ring))
    if not isinstance(layout, str):  # which knows its length
        assert torch.equal(whole, gather(shard, group=group, layout=layout))
    return {name: y.detach().numpy() for name, y in got.items()}


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
