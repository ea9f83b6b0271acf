"""The torch layers: rotary embeddings and attention against float64, the loss against one device, weights to numpy and back."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ring_attn_core import Band, causal, full, sliding_window
from ring_attn_torch import (
    RingAttention,
    RingTransformer,
    RotaryEmbedding,
    from_numpy,
    loss,
    sum_gradients,
    to_layout,
    to_numpy,
)

from ..support.models import (
    LAYER,
    LENGTH,
    MIDDLE,
    TRANSFORMER,
    VOCAB,
    arguments_of_attention,
    assert_near,
    check_layer,
    layer_data,
    layer_pair,
    layer_weights,
    token_ids,
    token_pair,
    transformer_weights,
)
from ..support.spawn import PerRank
from .models import Group, layer_on_rank, packed_training, packed_training_on_rank, transformer_on_rank, whole

ARGUMENTS = arguments_of_attention()


@pytest.mark.parametrize(("ranks", "layout"), [(1, "zigzag"), (4, "zigzag"), (3, "striped"), (4, "contiguous")])
def test_layer_over_a_ring_is_exact(gloo, ranks, layout):
    x, dout = layer_data()
    for got in gloo(ranks, layer_on_rank, layer_weights(), x, dout, {"layout": layout}):
        check_layer(got, layer_weights(), x, dout)


def test_layer_without_rotary_and_with_a_window_is_exact(gloo):
    x, dout = layer_data()
    arguments = {"rotary_base": None, "mask": sliding_window(6)}
    got, *_ = gloo(4, layer_on_rank, layer_weights(), x, dout, arguments)
    check_layer(got, layer_weights(), x, dout, **arguments)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_argument_of_attention_over_a_ring_is_exact(gloo, name):
    x, dout = layer_data()
    weights = layer_weights(sinks="sinks" in ARGUMENTS[name])
    for got in gloo(4, layer_on_rank, weights, x, dout, ARGUMENTS[name]):
        check_layer(got, weights, x, dout, **ARGUMENTS[name])


def test_layer_without_torch_distributed_is_a_ring_of_one():
    x, dout = layer_data()
    check_layer(layer_on_rank(None, layer_weights(), x, dout, {"layout": "contiguous"}), layer_weights(), x, dout)


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
    with pytest.raises(ValueError, match=f"labels hold {VOCAB}, and a vocabulary of {VOCAB} has 0 to {VOCAB - 1}"):
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


@pytest.mark.parametrize(
    ("mask", "sides", "windows"), [(causal(), (0, 1), (3, 7)), (full(), (1, 1), (5, 0)), (full(), (1, 1), (2, None))]
)
def test_a_token_reaches_as_far_as_the_windows_of_the_layers(gloo, mask, sides, windows):
    before, after = sides
    limits = [LENGTH if window is None else window for window in windows]
    for results in gloo(4, reached_on_rank, mask, windows):
        for reached, limit in zip(results, [*limits, sum(limits)], strict=True):
            first, last = max(MIDDLE - before * limit, 0), min(MIDDLE + after * limit, LENGTH - 1)
            np.testing.assert_array_equal(reached, np.arange(first, last + 1))


def reached_on_rank(group: Group, mask: Band, windows: tuple[int | None, ...]) -> list[np.ndarray]:
    """Whom the token in the MIDDLE changes: in the attention of every layer by itself, and in the logits."""
    model = from_numpy(RingTransformer(**TRANSFORMER, mask=mask, windows=windows, group=group), transformer_weights())
    mine = lambda array: to_layout(torch.from_numpy(array), "zigzag", 4).chunk(4, 1)[torch.distributed.get_rank(group)]
    reached = []
    for module, (array, other) in [*((block.attention, layer_pair()) for block in model.blocks), (model, token_pair())]:
        results = [whole(module(mine(x), length=LENGTH), "zigzag", group) for x in (array, other)]
        reached.append(np.flatnonzero((results[0] != results[1]).any((0, 2))))
    return reached


def test_layers_and_batch_rows_draw_their_dropout_by_themselves():
    model = RingTransformer(**TRANSFORMER, layout="contiguous", dropout_rate=0.4)
    ids = torch.from_numpy(token_ids()[0])
    logits = model(ids, dropout_seed=3)
    x, where = model.embed(ids), torch.arange(LENGTH)
    for offset, block in zip([(0, 0), (0, 4)], model.blocks, strict=True):
        x = block(x, where, dropout_seed=3, dropout_offset=offset)
    torch.testing.assert_close(logits, F.linear(model.norm(x), model.embed.weight))
    torch.testing.assert_close(logits[1:], model(ids[1:], dropout_seed=torch.tensor(3), dropout_offset=(1, 0)))
    for other in (model(ids), model(ids, dropout_seed=4), model(ids, dropout_seed=3, dropout_offset=(0, 1))):
        assert (other - logits).abs().max() > 1e-4


def test_a_call_without_a_seed_is_evaluation():
    x = torch.from_numpy(layer_data()[0])
    layer = RingAttention(**LAYER, layout="contiguous", dropout_rate=0.4)
    assert torch.equal(layer(x), layer.eval()(x))
    assert torch.equal(layer.train()(x, dropout_seed=3), layer.eval()(x, dropout_seed=3))
    assert not torch.equal(layer(x), layer(x, dropout_seed=3))


@pytest.mark.exhaustive
def test_packed_training_over_a_ring_is_the_one_on_one_device(gloo):
    alone = packed_training_on_rank(None)
    for ring in packed_training(gloo, 4):
        np.testing.assert_allclose(ring["losses"], alone["losses"], rtol=1e-5)
        assert_near(ring, alone, 1e-5)
    assert alone["losses"][-1] < 0.5 * alone["losses"][0]


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
    layer = RingAttention(24, 4, sinks=True, alibi=True, group=group).bfloat16()
    x = torch.ones(1, 6, 24, dtype=torch.bfloat16)
    return torch.equal(copy.deepcopy(layer)(x), layer(x)) and layer(x).dtype == torch.bfloat16


@pytest.mark.slow
def test_a_transformer_and_its_loss_compile_as_one_graph():
    everything = {"windows": (9,), "softcap": 2.0, "sinks": True, "alibi": True, "dropout_rate": 0.2}
    model = RingTransformer(**TRANSFORMER | {"depth": 1, "layout": "contiguous"} | everything)
    ids, labels = map(torch.from_numpy, token_ids())
    objective = lambda ids, labels, seed: loss(model(ids, dropout_seed=seed), labels)
    compiled = torch.compile(objective, fullgraph=True, backend="aot_eager")
    for seed in map(torch.tensor, (1, 2)):
        torch.testing.assert_close(compiled(ids, labels, seed), objective(ids, labels, seed))


def test_weights_in_numpy_are_copies():
    layer = RingAttention(24, 4, kv_heads=2, head_dim=8)
    state = to_numpy(layer)
    kept = {name: x.copy() for name, x in state.items()}
    for x in state.values():
        x[:] = 7
    for name, x in to_numpy(layer).items():
        np.testing.assert_array_equal(x, kept[name])


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
