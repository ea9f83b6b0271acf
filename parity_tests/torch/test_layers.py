"""The torch layers: their windows, training, copies and compilation, and gradients that some ranks lack."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from ring_attn_torch import RingAttention, RingTransformer, loss, sum_gradients

from ..support.models import EVERYTHING, LAYER, layer_data, token_ids
from .models import Group


def test_gradients_are_summed_where_some_ranks_have_none(gloo):
    for weight, bias in gloo(3, summed_on_rank):
        np.testing.assert_array_equal(weight, np.full((2, 2), 3.0))
        np.testing.assert_array_equal(bias, [2.0, 2.0])


def summed_on_rank(group: Group) -> tuple[np.ndarray, np.ndarray]:
    """Rank r adds r to every weight's gradient, and only rank 2 has one for the bias, in another dtype."""
    rank = torch.distributed.get_rank(group)
    module = torch.nn.Linear(2, 2)
    module.bias = torch.nn.Parameter(module.bias.detach().bfloat16())
    module.weight.grad = torch.full_like(module.weight, rank)
    module.bias.grad = torch.full_like(module.bias, rank) if rank == 2 else None
    sum_gradients(module, group)
    assert module.bias.grad is not None and module.bias.grad.dtype == torch.bfloat16
    return module.weight.grad.numpy(), module.bias.grad.float().numpy()


def test_a_call_without_a_seed_is_evaluation():
    x = torch.from_numpy(layer_data()[0])
    layer = RingAttention(**LAYER, layout="contiguous", dropout_rate=0.4)
    assert torch.equal(layer(x), layer.eval()(x))
    assert torch.equal(layer.train()(x, dropout_seed=3), layer.eval()(x, dropout_seed=3))
    assert not torch.equal(layer(x), layer(x, dropout_seed=3))


def test_a_layer_can_be_copied_and_moved_to_another_dtype(gloo):
    assert gloo(2, copied_on_rank) == [True, True]


def copied_on_rank(group: Group) -> bool:
    layer = RingAttention(24, 4, sinks=True, alibi=True, group=group).bfloat16()
    x = torch.ones(1, 6, 24, dtype=torch.bfloat16)
    return torch.equal(copy.deepcopy(layer)(x), layer(x)) and layer(x).dtype == torch.bfloat16


@pytest.mark.slow
def test_a_transformer_and_its_loss_compile_as_one_graph():
    sizes: dict[str, Any] = EVERYTHING | {"layout": "contiguous"}
    model = RingTransformer(**sizes)
    ids, labels = map(torch.from_numpy, token_ids())
    objective = lambda ids, labels, seed: loss(model(ids, dropout_seed=seed), labels)
    compiled = torch.compile(objective, fullgraph=True, backend="aot_eager")
    for seed in map(torch.tensor, (1, 2)):
        torch.testing.assert_close(compiled(ids, labels, seed), objective(ids, labels, seed))
