"""Layers and transformers: weights go to numpy and back, and what does not fit is refused."""

from __future__ import annotations

import inspect
from dataclasses import fields

import numpy as np
import pytest

from ring_attn_core.model.config import TransformerConfig

from ..support.models import NEW, TRANSFORMER, token_ids, transformer_weights
from ..support.selection import first, in_each


@pytest.mark.parametrize(("tied", "sinks"), [(True, False), (False, True)])
def test_a_config_makes_a_model_whose_weights_go_to_numpy_and_back(framework, tied, sinks):
    config = TransformerConfig(**TRANSFORMER | NEW, tied=tied, sinks=sinks, alibi=True, compute_dtype="bfloat16")
    model = framework.make("RingTransformer.from_config", TransformerConfig.from_json(config.to_json()))
    assert model.config == config
    weights, made = transformer_weights(tied, sinks=sinks, **NEW), framework.to_numpy(model)
    assert {name: x.shape for name, x in made.items()} == {name: x.shape for name, x in weights.items()}
    for name, x in made.items():
        assert x.ndim > 1 or "sinks" in name or (x == ("bias" not in name)).all()
    for name, x in framework.to_numpy(framework.from_numpy(model, weights)).items():
        np.testing.assert_array_equal(x, weights[name])


@in_each("name", jax=first(NEW, 0), torch=NEW)
def test_every_new_argument_changes_the_logits(framework, name):
    ids, weights, logits = framework.array(token_ids()[0][:, :36]), transformer_weights(**NEW), []
    for sizes in (NEW, {feature: x for feature, x in NEW.items() if feature != name}):
        model = framework.make("RingTransformer", **TRANSFORMER | sizes, layout="contiguous", **framework.ring(1))
        framework.from_numpy(model, {w: weights[w] for w in transformer_weights(**sizes)})
        logits.append(framework.numpy(framework.compiled(lambda ids, model=model: model(ids))(ids)))
    assert np.abs(logits[0] - logits[1]).max() > 1e-3


@pytest.mark.parametrize(("kept", "computed"), [("bfloat16", None), ("bfloat16", "float32"), ("float32", "bfloat16")])
def test_weights_are_kept_and_activations_computed_in_the_dtypes_of_the_config(framework, kept, computed):
    dtype = lambda name: name and framework.array(np.zeros(1), name).dtype
    sizes = TRANSFORMER | NEW | {"tied": False, "layout": "contiguous"}
    named, given = (
        framework.make("RingTransformer", **sizes, param_dtype=of(kept), compute_dtype=of(computed), **framework.ring(1))
        for of in (lambda name: name, dtype)
    )
    assert {x.dtype for model in (named, given) for x in framework.parameters(model)} == {dtype(kept)}
    assert named.config == given.config
    ids = framework.array(np.zeros((1, 8), np.int32))
    assert framework.compiled(lambda ids: named(ids))(ids).dtype == dtype(computed or kept)
    with pytest.raises(ValueError, match=r"param_dtype must be one of float32, .*, got 'half'"):
        framework.make("RingTransformer", **TRANSFORMER, param_dtype="half")


def test_every_field_of_a_config_is_an_argument_of_the_transformer(framework):
    of = framework.RingTransformer
    made, loaded = (set(inspect.signature(function).parameters) for function in (of.__init__, of.from_config))
    names = {x.name for x in fields(TransformerConfig)}
    assert names <= made
    assert made - names - {"self"} == loaded - {"config"}


def test_a_state_with_one_name_too_many_changes_nothing(framework):
    layer = framework.make("RingAttention", 24, 4, kv_heads=2, head_dim=8)
    state = framework.to_numpy(layer)
    with pytest.raises(ValueError, match=r"w\.weight is unexpected"):
        framework.from_numpy(layer, {name: x + 1 for name, x in state.items()} | {"w.weight": state["o.weight"]})
    for name, x in framework.to_numpy(layer).items():
        np.testing.assert_array_equal(x, state[name])


def test_a_state_that_does_not_fit_is_refused_with_every_reason(framework):
    layer = framework.make("RingAttention", 24, 4, kv_heads=2, head_dim=8)
    state = framework.to_numpy(layer)
    wrong = {name.replace("o.", "w."): x.T if name == "q.weight" else x for name, x in state.items()}
    message = r"o.weight is missing; w.weight is unexpected; q.weight is \[24, 32\] and must be \[32, 24\]"
    with pytest.raises(ValueError, match=message):
        framework.from_numpy(layer, wrong)
    np.testing.assert_array_equal(framework.to_numpy(layer)["q.weight"], state["q.weight"])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dim": 24, "heads": 5}, "dim=24 cannot be split over heads=5"),
        ({"dim": 24, "heads": 4, "kv_heads": 3}, "kv_heads=3 must divide heads=4"),
        ({"dim": 12, "heads": 4}, "head_dim must be even, got 3"),
        ({"dim": 24, "heads": 0}, "heads must be an int of at least 1, got 0"),
        ({"dim": 24, "heads": 4, "rotary_base": 0.5}, "base of rotary embeddings must be greater than 1"),
        ({"dim": 24, "heads": 4, "softcap": 0}, "softcap must be a Python number above 0 .*, got 0"),
        ({"dim": 24, "heads": 4, "sinks": 4}, "sinks must be True or False, got 4"),
        ({"dim": 24, "heads": 4, "alibi": None}, "alibi must be True or False, got None"),
        ({"dim": 24, "heads": 4, "dropout_rate": 1.0}, "from 0 to below 1, got 1.0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(framework, sizes, message):
    with pytest.raises(ValueError, match=message):
        framework.make("RingAttention", **sizes)


MLP_CHUNK = "mlp_chunk is a number of tokens, an int of at least 1, got"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"windows": 4}, "windows must be a list of one value for each of 2 layers, .*, got 4"),
        ({"windows": [4]}, r"one value for each of 2 layers, .*, got \[4\]"),
        ({"windows": [None, -1]}, r"windows\[1\] must be an int of at least 0, .*, got -1"),
        ({"windows": [3.0, None]}, r"windows\[0\] must be an int of at least 0, .*, got 3.0"),
        ({"windows": [True, None]}, r"windows\[0\] must be an int of at least 0, .*, got True"),
        ({"activations": "block"}, "activations must be one of keep, recompute, offload, got 'block'"),
        *(({"mlp_chunk": chunk}, MLP_CHUNK) for chunk in (0, -1, 2.0, True, "3")),
    ],
)
def test_layers_that_do_not_fit_are_refused(framework, sizes, message):
    with pytest.raises(ValueError, match=message):
        framework.make("RingTransformer", **TRANSFORMER, **sizes)


def test_an_invalid_context_is_refused(framework):
    layer, x = framework.make("RingAttention", 24, 4, kv_heads=2), framework.array(np.ones((1, 4, 24), np.float32))
    with pytest.raises(ValueError, match=r"context must be \[batch, tokens, 24\], got \[1, 4, 23\]"):
        layer(x, context=x[..., 1:])
    with pytest.raises(ValueError, match="context_length was given without context: pass the sequence"):
        layer(x, context_length=3)
    with pytest.raises(ValueError, match="context_positions was given without context"):
        layer(x, context_positions=framework.array(np.arange(4)))


def test_a_cache_is_made_for_a_models_config(framework):
    config = TransformerConfig(vocab=10, dim=32, depth=3, heads=4, kv_heads=2)
    for given, dtype in (({}, "float32"), ({"dtype": "float16"}, "float16")):
        cache = framework.KVCache.make(config, 1, 7, **framework.ring(1), **given)
        assert tuple(cache.k.shape) == (3, 1, 7 + (framework.name == "torch"), 2, 8)  # in PyTorch with an extra slot
        assert str(cache.k.dtype).removeprefix("torch.") == dtype


def test_arguments_of_shards_and_of_whole_sequences_do_not_mix(framework):
    ids = framework.array(np.ones((2, 8), int))
    make = lambda auto_shard: framework.make("RingTransformer", **TRANSFORMER, auto_shard=auto_shard, **framework.ring(1))
    whole, shards = make(True), make(False)
    with pytest.raises(ValueError, match="mask is for whole sequences, with auto_shard=True"):
        shards(ids, mask=ids > 0)
    for name, x in {"positions": framework.array(np.arange(8)), "length": 7, "key_mask": ids > 0}.items():
        with pytest.raises(ValueError, match=f"{name} belongs to shards"):
            whole(ids, **{name: x})
    with pytest.raises(ValueError, match=r"mask must be bool \[2, 8\], .*, got (torch\.)?int\d\d \[2, 8\]"):
        whole(ids, mask=ids)
    with pytest.raises(ValueError, match="auto_shard must be True or False, got 1"):
        make(1)
