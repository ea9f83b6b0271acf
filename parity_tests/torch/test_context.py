"""Cross-attention of a RingAttention in PyTorch: queries of one sharded sequence, keys and values of another."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ring_attn_core import full
from ring_attn_torch import RingAttention, from_numpy, to_layout

from ..support.contexts import CONTEXT_LENGTH, arrays, check_cross_attention
from ..support.models import LAYER, LENGTH, Arrays, layer_weights
from .models import Group, gradients, rank_in, ranks_of


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize(("ranks", "layout"), [(1, "contiguous"), (2, "zigzag"), (4, "zigzag"), (4, "striped")])
def test_cross_attention_over_a_ring_is_exact(gloo, ranks, layout, rotary):
    results = gloo(ranks, cross_on_rank, layout, rotary)
    got = {name: np.sum([each[name] for each in results], 0) for name in results[0]}
    check_cross_attention(got, layout, ranks, rotary)


def cross_on_rank(group: Group, layout: str, rotary: bool) -> Arrays:
    """This rank's part of the weights' gradients, and out, dx and dcontext where this rank has tokens, 0 elsewhere."""
    made = {"mask": full(), "layout": layout, "rotary_base": 10000.0 if rotary else None}
    layer = from_numpy(RingAttention(**LAYER | made, group=group), layer_weights())
    whole = lambda x, pad=0: to_layout(torch.from_numpy(x), layout, ranks_of(group), pad_value=pad)
    mine = lambda x, pad=0: whole(x, pad).chunk(ranks_of(group), 1)[rank_in(group)]
    x, context, key_mask, dout = arrays()
    leaves = [mine(each).requires_grad_() for each in (x, context)]
    called = {"context": leaves[1], "context_length": CONTEXT_LENGTH, "key_mask": mine(key_mask, False)}
    out = layer(leaves[0], length=LENGTH, **called)
    out.backward(mine(dout))
    placed = {"out": (out.detach(), x), "dx": (leaves[0].grad, x), "dcontext": (leaves[1].grad, context)}
    results = gradients(layer)
    for name, (shard, like) in placed.items():
        spread = torch.zeros_like(whole(like))
        spread.chunk(ranks_of(group), 1)[rank_in(group)].copy_(shard)
        results[name] = spread.numpy()
    return results


def test_a_context_that_is_x_is_self_attention():
    layer = RingAttention(**LAYER, layout="contiguous")
    x = torch.from_numpy(arrays()[0])
    assert torch.equal(layer(x), layer(x, context=x))
    positions = torch.arange(LENGTH) * 3
    assert torch.equal(layer(x, positions), layer(x, positions, context=x, context_positions=positions))
    assert not torch.equal(layer(x, positions), layer(x, positions, context=x))


def test_a_context_of_no_length_is_all_that_its_shards_hold():
    layer = RingAttention(**LAYER, layout="contiguous", mask=full())
    x, context = (torch.from_numpy(each) for each in arrays()[:2])
    torch.testing.assert_close(layer(x, length=5, context=x)[:, :5], layer(x[:, :5], context=x))
    assert torch.equal(layer(x, context=context), layer(x, context=context, context_length=CONTEXT_LENGTH))
