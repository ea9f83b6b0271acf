"""``order="global"`` of PyTorch: the same bits on any number of ranks and in any layout, on gloo."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ring_attn_core.model.config import TransformerConfig
from ring_attn_torch import KVCache, RingTransformer, loss, prefill_prompts, ring_attention

from ..support import warm
from ..support.cases import Case
from ..support.losses import exact_loss
from ..support.models import layer_data
from ..support.orders import (
    BALANCED,
    BALANCED_RINGS,
    IN_LOSS,
    MORE_RINGS,
    ORDERED,
    TWO_FEATURES,
    check_bits,
    check_other_documents,
    loss_data,
    selections,
)
from ..support.programs import environment
from ..support.selection import one_in
from ..support.spawn import PerRank
from .models import layer_on_rank
from .ring import on_rank, run
from .test_strategies import under_compile


@pytest.mark.parametrize("case", ORDERED.values(), ids=ORDERED)
def test_results_have_the_same_bits_on_1_2_3_and_4_ranks(gloo, case):
    check_bits(case, partial(run, gloo))


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ORDERED.values(), ids=ORDERED)
def test_results_have_the_same_bits_on_up_to_8_ranks_in_every_layout(gloo, case):
    check_bits(case, partial(run, gloo), MORE_RINGS)


@pytest.mark.parametrize("case", one_in(8, TWO_FEATURES), ids=str)
def test_any_two_features_together_have_the_same_bits_on_every_ring(gloo, case):
    check_bits(case, partial(run, gloo))


def test_balanced_layouts_have_the_bits_of_one_rank(gloo):
    check_bits(BALANCED, partial(run, gloo), BALANCED_RINGS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_compiled_call_keeps_the_order(gloo, ranks):
    case = Case(order="global", sinks=True, extents="documents", ranks=ranks)
    inputs = [PerRank(*x) for x in case.inputs()]
    for compiled, eager in zip(gloo(ranks, under_compile, case, *inputs), gloo(ranks, on_rank, case, *inputs), strict=True):
        for a, b in zip(compiled, eager, strict=True):
            assert a.tobytes() == b.tobytes()


def test_one_rank_needs_no_group():
    q, k = torch.randn(1, 10, 4, 8), torch.randn(1, 10, 2, 8)
    expected = ring_attention(q, k, k)
    torch.testing.assert_close(ring_attention(q, k, k, order="global"), expected)


def other_orders(group, *arguments):
    q = torch.randn(1, 8, 2, 4)
    return ring_attention(q, q, q, group=group, order=arguments[0])


def test_ranks_with_other_orders_are_told_so(gloo):
    for error in gloo.outcomes(2, other_orders, PerRank("ring", "global")):
        assert isinstance(error, ValueError)
        assert "disagree on order: 'ring' on rank 0, 'global' on rank 1" in str(error)


def test_other_documents_of_the_row_change_no_bit(gloo):
    check_other_documents(partial(run, gloo), ranks=3, layout="zigzag")


def test_a_layer_has_the_same_bits_on_1_2_and_3_ranks(gloo):
    x, dout = layer_data()
    rings = (1, "zigzag"), (2, "zigzag"), (3, "striped")
    results = [
        gloo(ranks, layer_on_rank, selections(), x, dout, {"layout": layout, "order": "global"})[0] for ranks, layout in rings
    ]
    for got in results[1:]:
        assert got["out"].tobytes() == results[0]["out"].tobytes()
        assert got["dx"].tobytes() == results[0]["dx"].tobytes()


def loss_on_rank(group, weighted, chunk, logits, labels, weights):
    leaf = torch.from_numpy(logits).requires_grad_()
    options: dict[str, Any] = {
        "label_weights": torch.from_numpy(weights) if weighted else None,
        "chunk": chunk,
        "order": "global",
    }
    value = loss(leaf, torch.from_numpy(labels), **options, group=group)
    return value.item(), torch.autograd.grad(value, leaf)[0].numpy()


@pytest.mark.parametrize("weighted", [False, True])
def test_a_loss_has_the_same_bits_on_1_2_and_4_ranks(gloo, weighted):
    results = []
    for chunk, (ranks, layout) in enumerate(IN_LOSS, 5):
        shards, order = loss_data(ranks, layout)
        ranked = gloo(ranks, loss_on_rank, weighted, chunk, *[PerRank(*np.split(x, ranks, 1)) for x in shards])
        gradient = np.concatenate([each for _, each in ranked], 1)[:, np.argsort(order)]
        results.append(({value for value, _ in ranked}, gradient.tobytes()))
    assert all(each == results[0] for each in results)
    (logits, labels, weights), _ = loss_data(1, "contiguous")
    zeros = np.eye(logits.shape[-1])
    truth = exact_loss(logits, zeros, labels, weights=weights if weighted else None)["loss"]
    assert abs(results[0][0].pop() / truth - 1) < 1e-6


@pytest.mark.exhaustive
def test_the_loss_gradients_and_weights_of_a_model_have_the_same_bits_on_1_2_and_4_ranks(tmp_path):
    program = [str(Path(__file__).parents[2] / "examples" / "torch_same_bits.py")]
    one, *others = (warm.run(program, "torch", tmp_path, environment(), processes=ranks) for ranks in (1, 2, 4))
    assert one.count("step") == 3 and others == [one, one]


def test_a_loss_of_hidden_states_in_global_order_is_exact():
    hidden, labels = torch.randn(1, 33, 8, dtype=torch.float64), torch.arange(33)[None] % 17
    labels[0, :5], head = -100, torch.randn(17, 8, dtype=torch.float64)
    got = loss(hidden, labels, head=head, chunk=7, order="global")
    truth = exact_loss(hidden.numpy(), head.numpy(), labels.numpy())["loss"]
    assert abs(got.item() - truth) < 1e-14


@pytest.mark.parametrize("scale", [-0.1, 1e-16, 1e18])
def test_a_sum_in_global_order_is_exact_for_weights_of_any_sign_and_size(scale):
    logits, labels, weights = map(torch.from_numpy, loss_data(1, "contiguous")[0])
    summed = partial(loss, logits, labels, label_weights=scale * weights, reduction="sum")
    assert abs(summed(order="global").item() / summed(order="ring").item() - 1) < 1e-6


def test_what_cannot_keep_the_order_is_refused_by_name():
    hidden = torch.zeros(1, 4, 8)
    with pytest.raises(ValueError, match='order must be "ring" or "global", got \'up\''):
        loss(hidden, torch.zeros(1, 4, dtype=torch.int64), order="up")
    sizes: dict[str, Any] = {"vocab": 5, "dim": 8, "depth": 1, "heads": 2}
    with pytest.raises(ValueError, match=r'Mamba2 carries a state .* cannot keep order="global"'):
        RingTransformer(**sizes, mixers=["mamba2"], order="global")
    model = RingTransformer(**sizes, order="global")
    cache = KVCache.make(TransformerConfig(**sizes), 1, 8)
    with pytest.raises(ValueError, match='prefill and decoding cannot keep order="global"'):
        prefill_prompts(model, torch.zeros(1, 4, dtype=torch.int64), cache)
