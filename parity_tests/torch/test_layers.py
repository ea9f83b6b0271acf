"""The torch layers: rotary embeddings and attention against float64, the loss against one device, weights to numpy and back."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from parity_tests.models import (
    LENGTH,
    TRANSFORMER,
    VOCAB,
    assert_near,
    check_layer,
    layer_data,
    layer_weights,
    rotate,
    token_ids,
    transformer_weights,
)
from parity_tests.spawn import PerRank
from parity_tests.torch.models import Group, layer_on_rank, transformer_on_rank
from ring_attn_core import LAYOUTS, sliding_window
from ring_attn_torch import from_layout, positions, to_layout
from ring_attn_torch.layers import RingAttention, RotaryEmbedding
from ring_attn_torch.state import from_numpy, to_numpy
from ring_attn_torch.transformer import RingTransformer, loss, sum_gradients


@pytest.mark.parametrize(("ranks", "layout"), [(1, "zigzag"), (4, "zigzag"), (3, "striped"), (4, "contiguous")])
def test_layer_over_a_ring_is_exact(gloo, ranks, layout):
    x, dout = layer_data()
    for got in gloo(ranks, layer_on_rank, layer_weights(), x, dout, {"layout": layout}):
        check_layer(got, layer_weights(), x, dout)


def test_layer_without_rotary_and_with_a_window_is_exact(gloo):
    x, dout = layer_data()
    got, *_ = gloo(4, layer_on_rank, layer_weights(), x, dout, {"rotary_base": None, "mask": sliding_window(6)})
    check_layer(got, layer_weights(), x, dout, base=None, mask=sliding_window(6))


def test_layer_without_torch_distributed_is_a_ring_of_one():
    x, dout = layer_data()
    check_layer(layer_on_rank(None, layer_weights(), x, dout, {"layout": "contiguous"}), layer_weights(), x, dout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotary_of_every_shard_is_the_shard_of_the_rotated_whole(layout):
    x = np.random.default_rng(0).standard_normal((2, LENGTH, 3, 8)).astype(np.float32)
    shards = to_layout(torch.from_numpy(x), layout, 4).chunk(4, 1)
    rotary = RotaryEmbedding(8)
    turned = [rotary(shard, positions(layout, 4, LENGTH, rank)) for rank, shard in enumerate(shards)]
    whole = from_layout(torch.cat(turned, 1), layout, 4, LENGTH)
    np.testing.assert_allclose(whole, rotate(x.astype(np.float64), np.arange(LENGTH)), atol=1e-5)


def test_rotary_is_right_at_a_million_tokens_and_for_positions_of_every_row():
    where = np.stack([np.arange(LENGTH), 2**20 - 1 - 513 * np.arange(LENGTH)]).astype(np.int32)
    x = np.random.default_rng(0).standard_normal((2, LENGTH, 3, 64)).astype(np.float32)
    turned = RotaryEmbedding(64, base=500000.0)(torch.from_numpy(x), torch.from_numpy(where))
    for row in range(2):
        exact = rotate(x[row : row + 1].astype(np.float64), where[row], base=500000.0)
        np.testing.assert_allclose(turned[row : row + 1], exact, atol=2e-3)


def test_rotary_of_bfloat16_does_not_round_positions():
    where = np.arange(250, 250 + LENGTH, dtype=np.int32)
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((1, LENGTH, 2, 16))).bfloat16()
    turned = RotaryEmbedding(16).bfloat16()(x, torch.from_numpy(where))
    assert turned.dtype == torch.bfloat16
    exact = torch.from_numpy(rotate(x.double().numpy(), where)).bfloat16()
    assert (turned == exact).double().mean() > 0.99
    np.testing.assert_allclose(turned.float(), exact.float(), atol=2**-6)


@pytest.mark.parametrize("counts", [(3, 0, 10, 1), (0, 0, 0, 0)])
def test_loss_over_ranks_with_uneven_labels_is_one_devices(gloo, counts):
    logits = np.random.default_rng(0).standard_normal((2, 40, VOCAB)).astype(np.float32)
    labels = np.full((2, 40), -100, np.int32)
    for rank, count in enumerate(counts):
        labels[1, rank * 10 : rank * 10 + count] = np.arange(count)
    value, gradient = loss_on_rank(None, logits, labels)
    results = gloo(4, loss_on_rank, PerRank(*np.split(logits, 4, 1)), PerRank(*np.split(labels, 4, 1)))
    assert len({ring_value for ring_value, _ in results}) == 1
    np.testing.assert_allclose(results[0][0], value, rtol=1e-6)
    np.testing.assert_allclose(np.concatenate([part for _, part in results], 1), gradient, atol=1e-7)
    wide = logits.astype(np.float64)
    each = np.log(np.exp(wide).sum(-1)) - np.take_along_axis(wide, np.maximum(labels, 0)[..., None], -1)[..., 0]
    np.testing.assert_allclose(value, each[labels != -100].sum() / max(sum(counts), 1), rtol=1e-6)


def loss_on_rank(group: Group, logits: np.ndarray, labels: np.ndarray) -> tuple[float, np.ndarray]:
    leaf = torch.from_numpy(logits).requires_grad_()
    value = loss(leaf, torch.from_numpy(labels), group=group)
    value.backward()
    assert leaf.grad is not None
    return value.item(), leaf.grad.numpy()


def test_loss_of_bfloat16_logits_is_float32_and_a_label_outside_the_vocabulary_raises():
    logits = torch.ones(1, 4, VOCAB, dtype=torch.bfloat16)
    value = loss(logits, torch.tensor([[1, 2, -100, 3]]))
    assert value.dtype == torch.float32
    np.testing.assert_allclose(value, np.log(VOCAB), rtol=1e-6)
    with pytest.raises(IndexError):
        loss(logits, torch.tensor([[1, VOCAB, 2, 3]]))


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
    assert module.bias.grad is not None
    assert module.bias.grad.dtype == torch.bfloat16
    return module.weight.grad.numpy(), module.bias.grad.float().numpy()


def test_a_transformer_computes_in_bfloat16_from_float32_weights():
    ids, labels = token_ids()
    sizes = [{"tied": False, "compute_dtype": dtype} for dtype in (None, torch.bfloat16)]
    wide, narrow = (transformer_on_rank(None, transformer_weights(False), ids, labels, "contiguous", s) for s in sizes)
    assert_near(narrow, wide, 0.05)
    logits = RingTransformer(**TRANSFORMER, layout="contiguous", compute_dtype=torch.bfloat16)(torch.from_numpy(ids))
    assert logits.dtype == torch.bfloat16


def test_a_layer_can_be_copied_and_moved_to_another_dtype(gloo):
    assert gloo(2, copied_on_rank) == [True, True]


def copied_on_rank(group: Group) -> bool:
    layer = RingAttention(24, 4, group=group).bfloat16()
    x = torch.ones(1, 6, 24, dtype=torch.bfloat16)
    return torch.equal(copy.deepcopy(layer)(x), layer(x)) and layer(x).dtype == torch.bfloat16


def test_a_transformer_and_its_loss_compile_as_one_graph():
    model = RingTransformer(**TRANSFORMER | {"depth": 1, "layout": "contiguous"})
    ids, labels = map(torch.from_numpy, token_ids())
    objective = lambda ids, labels: loss(model(ids), labels)
    compiled = torch.compile(objective, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids, labels), objective(ids, labels))


@pytest.mark.parametrize("tied", [True, False])
def test_weights_go_to_numpy_and_back(tied):
    model = RingTransformer(**TRANSFORMER | {"tied": tied})
    weights = transformer_weights(tied)
    assert {name: x.shape for name, x in to_numpy(model).items()} == {name: x.shape for name, x in weights.items()}
    for name, x in to_numpy(from_numpy(model, weights)).items():
        np.testing.assert_array_equal(x, weights[name])


def test_a_state_that_does_not_fit_is_refused_with_every_reason():
    layer = RingAttention(24, 4, kv_heads=2, head_dim=8)
    state = to_numpy(layer)
    wrong = {name.replace("o.", "w."): x.T if name == "q.weight" else x for name, x in state.items()}
    message = r"o.weight is missing; w.weight is unexpected; q.weight is \[24, 32\] and must be \[32, 24\]"
    with pytest.raises(ValueError, match=message):
        from_numpy(layer, wrong)
    np.testing.assert_array_equal(to_numpy(layer)["q.weight"], state["q.weight"])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dim": 24, "heads": 5}, "dim=24 cannot be split over heads=5"),
        ({"dim": 24, "heads": 4, "kv_heads": 3}, "kv_heads=3 must divide heads=4"),
        ({"dim": 12, "heads": 4}, "head_dim must be even, got 3"),
        ({"dim": 24, "heads": 0}, "heads must be an int of at least 1, got 0"),
        ({"dim": 24, "heads": 4, "rotary_base": 0.5}, "base of rotary embeddings must be greater than 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        RingAttention(**sizes)


def test_arrays_that_do_not_fit_are_refused():
    rotary, x = RotaryEmbedding(8), torch.ones(2, 4, 1, 8)
    with pytest.raises(ValueError, match=r"positions must be integers, got torch.float32"):
        rotary(x, torch.arange(4.0))
    with pytest.raises(ValueError, match=r"must be \[4\] or \[2, 4\], got \[5\]"):
        rotary(x, torch.arange(5))
    with pytest.raises(ValueError, match=r"x must be \[batch, tokens, heads, 8\], got \[2, 4, 8\]"):
        rotary(x[:, :, 0], torch.arange(4))
    with pytest.raises(ValueError, match=r"x must be \[batch, tokens, 24\], got \[4, 24\]"):
        RingAttention(24, 4)(torch.ones(4, 24))
    with pytest.raises(ValueError, match=r"labels must be \[2, 4\]"):
        loss(torch.ones(2, 4, 7), torch.ones(2, 5, dtype=torch.int32))


def test_an_indivisible_shard_is_refused_in_the_words_of_ring_attention():
    with pytest.raises(ValueError, match="to_layout"):
        RingAttention(24, 4, layout="zigzag")(torch.ones(1, 5, 24))
