"""The layers: attention over a ring against float64, the loss against one device, dropout, dtypes, and what does not fit."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from ring_attn_core import causal, full, sliding_window

from ..support.models import (
    EVERYTHING,
    LAYER,
    LENGTH,
    MIDDLE,
    TRANSFORMER,
    VOCAB,
    arguments_of_attention,
    assert_near,
    check_layer,
    dilated_arguments,
    layer_data,
    layer_weights,
    packed_batch,
    token_data,
    token_ids,
    token_pair,
    transformer_weights,
)
from ..support.selection import first, grid, in_each
from ..support.summaries import SUMMARY_LAYER, check_summary_layer, summary_weights

ARGUMENTS = arguments_of_attention()
IN_JAX = [(2, "zigzag", False), (4, "zigzag", True), (3, "striped", False), (1, "zigzag", False)]


@in_each(
    "ranks,layout,whole",
    jax=first(IN_JAX),
    torch=[(1, "zigzag", False), (4, "zigzag", False), (3, "striped", False), (4, "contiguous", False)],
)
def test_layer_over_a_ring_is_exact(framework, ranks, layout, whole):
    x, dout = layer_data()
    check_layer(framework.layer(layer_weights(), x, dout, ranks, {"layout": layout}, whole=whole), layer_weights(), x, dout)


@in_each("ranks", jax=first([2], 0), torch=[4])
def test_layer_without_rotary_and_with_a_window_is_exact(framework, ranks):
    x, dout = layer_data()
    arguments = {"rotary_base": None, "mask": sliding_window(6)}
    check_layer(framework.layer(layer_weights(), x, dout, ranks, arguments), layer_weights(), x, dout, **arguments)


EACH_IN_JAX = [("everything", 2, False), ("everything", 4, True), *((name, 2, False) for name in [*ARGUMENTS][:-1])]


@in_each("name,ranks,whole", jax=first(EACH_IN_JAX, 0, 2), torch=[(name, 4, False) for name in ARGUMENTS])
def test_every_argument_of_attention_over_a_ring_is_exact(framework, name, ranks, whole):
    x, dout = layer_data()
    weights = layer_weights(sinks="sinks" in ARGUMENTS[name])
    got = framework.layer(weights, x, dout, ranks, ARGUMENTS[name], whole=whole)
    check_layer(got, weights, x, dout, **ARGUMENTS[name])


DILATED = dilated_arguments()
ONE_SEGMENT = {"segments": (64,), "dilations": (1,)}
"""It covers every sequence here: all tokens attend to all."""


@in_each(
    "name,ranks,whole",
    jax=first([("hidden keys", 2, False), ("window", 1, False), ("heads", 4, True)]),
    torch=grid(DILATED, first([3, 1, 2, 4], 2), [False]),
)
def test_the_dilated_layer_is_dense_attention_of_the_same_sparsity(framework, name, ranks, whole):
    x, dout = layer_data()
    got = framework.layer(layer_weights(), x, dout, ranks, DILATED[name], whole=whole)
    check_layer(got, layer_weights(), x, dout, **DILATED[name])


@in_each("ranks", jax=first([2], 0), torch=[3])
def test_the_dilated_layer_of_one_segment_is_ring_attention(framework, ranks):
    arguments = {"layout": "contiguous"}, ONE_SEGMENT
    ring, dilated = (framework.layer(layer_weights(), *layer_data(), ranks, each) for each in arguments)
    assert_near(dilated, ring, 1e-6)


def test_the_dilated_layer_has_the_weights_of_ring_attention_by_the_same_seed(framework):
    made = ("RingAttention", {}), ("DilatedRingAttention", ONE_SEGMENT)
    one, other = (framework.to_numpy(framework.make(kind, **LAYER, qk_norm=True, qkv_bias=True, **more)) for kind, more in made)
    assert list(one) == list(other)
    for name, x in one.items():
        np.testing.assert_array_equal(x, other[name])


@pytest.mark.exhaustive
def test_the_dilated_layer_with_norms_and_biases_is_one_on_any_ring_of_either_framework(frameworks):
    sizes = {"qk_norm": True, "qkv_bias": True}
    run = lambda each, ranks: each.layer(layer_weights(**sizes), *layer_data(), ranks, DILATED["softmax"] | sizes)
    one, *others = (run(each, ranks) for each in frameworks for ranks in (1, 3))
    for other in others:
        assert_near(other, one, 1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dilations": (1,)}, "one dilation for each segment"),
        ({"segments": (3, 8, 9), "dilations": (1, 2, 3), "mixing": "heads"}, "got 3 patterns for 2 heads"),
        ({"strategy": "mesh"}, "strategy"),
        ({"deterministic": 1}, "deterministic must be True or False"),
    ],
)
def test_patterns_and_options_that_do_not_fit_are_refused_by_the_dilated_layer(framework, arguments, words):
    with pytest.raises(ValueError, match=words):
        framework.make("DilatedRingAttention", 12, 2, **{"segments": (3, 8), "dilations": (1, 2)} | arguments)


@in_each("ranks", jax=first([4], 0), torch=[4])
def test_future_tokens_change_nothing_in_the_dilated_layer(framework, ranks):
    (x, dout), half = layer_data(), LENGTH // 2
    other = x.copy()
    other[:, half:] += 1
    outs = [framework.layer(layer_weights(), each, dout, ranks, DILATED["softmax"])["out"] for each in (x, other)]
    np.testing.assert_array_equal(outs[0][:, :half], outs[1][:, :half])
    assert (outs[0] != outs[1]).any()


@in_each("ranks,whole", jax=[(2, False), *first([(2, True)], 0)], torch=[(1, False), (4, False)], slow="jax")
def test_the_layer_of_summaries_is_right_in_every_weight(framework, ranks, whole):
    x, dout = layer_data()
    arguments = {name: SUMMARY_LAYER[name] for name in ("block", "summaries", "window")}
    check_summary_layer(framework.layer(summary_weights(), x, dout, ranks, arguments, whole=whole), summary_weights(), x, dout)


@pytest.mark.exhaustive
def test_a_transformer_of_every_feature_is_one_on_any_ring_of_either_framework(frameworks):
    """Logits, loss and gradients over packed documents, a key mask and dropout; PyTorch on one device has no group."""
    options = EVERYTHING | {"seed": 7}
    run = lambda each, ranks: each.transformer(ranks, "zigzag" if ranks > 1 else "contiguous", packed_batch(), **options)
    one, *others = (run(each, ranks) for each in frameworks for ranks in (1, 4))
    for other in others:
        assert_near(other, one, 1e-5)


WINDOWS = [(causal(), (3, 7)), (full(), (2, None)), (full(), (5, 0))]


@in_each("mask,windows", jax=first(WINDOWS, 1, 2), torch=WINDOWS, ids=lambda x: str(x).replace("None", "all"))
def test_a_token_reaches_as_far_as_the_windows_of_the_layers(framework, mask, windows):
    """Through all layers together, and through the first one if the other sees only itself."""
    labels = token_ids()[1]
    for limits in (windows, (windows[0], 0), (0, windows[1])):
        sizes = {"mask": mask, "windows": limits}
        run = lambda ids, sizes=sizes: framework.transformer(2, "zigzag", {"ids": ids, "labels": labels}, **sizes)
        one, other = (run(ids)["logits"] for ids in token_pair())
        limit = sum(LENGTH if window is None else window for window in limits)
        first, last = max(MIDDLE - limit * (mask == full()), 0), min(MIDDLE + limit, LENGTH - 1)
        np.testing.assert_array_equal(np.flatnonzero((one != other).any((0, 2))), np.arange(first, last + 1))


@in_each("ranks,tied", jax=first([(2, False), (4, True)], 0), torch=[(1, True), (2, False), (4, True), (4, False)])
def test_loss_and_gradients_in_chunks_are_those_of_the_whole(framework, ranks, tied):
    """In float64, where sums in another order differ by its rounding."""
    sizes = {"tied": tied, "depth": 1, "param_dtype": "float64"}
    with framework.x64():
        whole = framework.transformer(1, "contiguous", token_data(), **sizes)
        assert_near(framework.transformer(ranks, "striped", token_data(), chunk=7, mlp_chunk=3, **sizes), whole, 1e-13)


@pytest.mark.parametrize("counts", [(3, 0, 10, 1), (0, 0, 0, 0)])
def test_loss_over_ranks_with_uneven_labels_is_one_devices(framework, counts):
    logits = np.random.default_rng(0).standard_normal((2, 40, VOCAB)).astype(np.float32)
    labels = np.full((2, 40), -100, np.int32)
    for rank, count in enumerate(counts):
        labels[1, rank * 10 : rank * 10 + count] = np.arange(count)
    whole = lambda logits: framework.loss(logits, framework.array(labels), **framework.no_ring)
    ((value,), (gradient,)) = framework.pull(whole, [logits])
    one = [np.ones((), np.float32)]
    ((of_ring,), (gradient_of_ring,)) = framework.over_ring(4, partial(framework.loss), [logits], cotangents=one, labels=labels)
    np.testing.assert_allclose(of_ring, value, rtol=1e-6)
    np.testing.assert_allclose(gradient_of_ring, gradient, atol=1e-7)
    wide = logits.astype(np.float64)
    each = np.log(np.exp(wide).sum(-1)) - np.take_along_axis(wide, np.maximum(labels, 0)[..., None], -1)[..., 0]
    np.testing.assert_allclose(value, each[labels != -100].sum() / max(sum(counts), 1), rtol=1e-6)


@in_each("rate", jax=first([0.4], 0), torch=[0.4])
def test_layers_and_batch_rows_draw_their_dropout_by_themselves(framework, rate):
    model = framework.make("RingTransformer", **TRANSFORMER, layout="contiguous", dropout_rate=rate, **framework.ring(1))
    ids = framework.array(token_ids()[0])
    call = lambda ids, **options: framework.numpy(framework.compiled(lambda ids: model(ids, **options))(ids))
    logits = call(ids, dropout_seed=3)
    x, where = model.embed(ids), framework.array(np.arange(LENGTH))
    for offset, block in zip([(0, 0), (0, 4)], model.blocks, strict=True):
        x = block(x, where, dropout_seed=3, dropout_offset=offset)
    np.testing.assert_allclose(framework.numpy(model.norm(x) @ model.head_weight.T), logits, atol=1e-5)
    np.testing.assert_allclose(logits[1:], call(ids[1:], dropout_seed=3, dropout_offset=(1, 0)), atol=1e-5)
    for other in (call(ids), call(ids, dropout_seed=4), call(ids, dropout_seed=3, dropout_offset=(0, 1))):
        assert np.abs(other - logits).max() > 1e-4


def test_a_call_without_a_seed_is_evaluation(framework):
    x = framework.array(layer_data()[0][:, :36])
    make = lambda rate: framework.make("RingAttention", **LAYER, layout="contiguous", dropout_rate=rate, **framework.ring(1))
    without, layer = make(0.0), make(0.4)
    framework.from_numpy(without, framework.to_numpy(layer))
    assert (layer(x) == without(x)).all()
    assert (layer(x, dropout_seed=3) != without(x)).any()


def test_a_transformer_computes_in_bfloat16_from_float32_weights(framework):
    ids, logits = framework.array(token_ids()[0][:, :36]), []
    for dtype in (None, "bfloat16"):
        sizes = TRANSFORMER | {"depth": 1, "compute_dtype": dtype and framework.array(np.zeros(1), dtype).dtype}
        model = framework.make("RingTransformer", **sizes, layout="contiguous", **framework.ring(1))
        framework.from_numpy(model, transformer_weights(depth=1))
        logits.append(framework.compiled(lambda ids, model=model: model(ids))(ids))
    assert str(logits[1].dtype).removeprefix("torch.") == "bfloat16"
    assert_near({"logits": framework.numpy(logits[1])}, {"logits": framework.numpy(logits[0])}, 0.02)


def test_weights_in_numpy_are_copies(framework):
    layer = framework.make("RingAttention", 24, 4, kv_heads=2, head_dim=8)
    state = framework.to_numpy(layer)
    kept = {name: x.copy() for name, x in state.items()}
    for x in state.values():
        x[:] = 7
    for name, x in framework.to_numpy(layer).items():
        np.testing.assert_array_equal(x, kept[name])


def test_arrays_that_do_not_fit_are_refused(framework):
    ones = lambda *shape: framework.array(np.ones(shape, np.float32))
    rotary, x = framework.RotaryEmbedding(8), ones(2, 4, 1, 8)
    layer = framework.make("RingAttention", 24, 4, **framework.ring(1))
    for positions, message in (
        (np.arange(4, dtype=np.float32), r"positions must be integers, got (torch\.)?float32"),
        (np.arange(5), r"must be \[4\] or \[2, 4\], got \[5\]"),
    ):
        with pytest.raises(ValueError, match=message):
            rotary(x, framework.array(positions))
    with pytest.raises(ValueError, match=r"x must be \[batch, tokens, heads, 8\], got \[2, 4, 8\]"):
        rotary(x[:, :, 0], framework.array(np.arange(4)))
    with pytest.raises(ValueError, match=r"x must be \[batch, tokens, 24\], got \[4, 24\]"):
        layer(ones(4, 24))
    with pytest.raises(ValueError, match=r"x must be \[batch, tokens, 24\], got \[4, 24\]"):
        framework.make("DilatedRingAttention", 24, 4, **ONE_SEGMENT)(ones(4, 24))
    with pytest.raises(ValueError, match="to_layout"):
        layer(ones(1, 5, 24))
    with pytest.raises(ValueError, match=r"labels must be \[2, 4\]"):
        framework.loss(ones(2, 4, 7), framework.array(np.ones((2, 5), int)), **framework.no_ring)
