"""One config, one model in both frameworks: logits, gradients, names and dtypes; and the logits that transformers computes."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from .support.models import LENGTH, TRANSFORMER, assert_near, token_ids, transformer_weights
from .support.published import LOOKED_AT, MODELS, SCALINGS, config_of, ids, recorded, their_logits, weights_of
from .support.selection import first

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
pytest.importorskip("flax")

import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402

import ring_attn_jax  # noqa: E402
import ring_attn_torch  # noqa: E402
from ring_attn_core.model.config import TransformerConfig  # noqa: E402
from ring_attn_core.model.rotary import (  # noqa: E402
    Linear,
    Llama3,
    Rotary,
    YaRN,
    attention_factor,
    inverse_frequencies,
)
from ring_attn_jax import from_numpy, to_numpy  # noqa: E402

from .jax.models import run_transformer  # noqa: E402
from .jax.ring import mesh_of  # noqa: E402
from .torch.models import transformer_on_rank  # noqa: E402

NEW: dict[str, Any] = {
    "qk_norm": True,
    "qkv_bias": True,
    "eps": 0.01,
    "rotaries": (Rotary(100.0, Llama3(4.0, 1.0, 4.0, 64)), Rotary(50.0, YaRN(3.0, 16))),
    "windows": (7, None),
}
"""Every new feature at once, of a size that shows in the logits."""


@pytest.mark.exhaustive
def test_jax_over_a_ring_is_torch_over_a_ring_and_torch_on_one_device(gloo):
    weights, (tokens, labels) = transformer_weights(False, **NEW), token_ids()
    ours = run_transformer(weights, tokens, labels, 2, "zigzag", **NEW, tied=False)
    assert_near(transformer_on_rank(None, weights, tokens, labels, "contiguous", NEW | {"tied": False}), ours, 1e-5)
    for theirs in gloo(2, transformer_on_rank, weights, tokens, labels, "zigzag", NEW | {"tied": False}):
        assert_near(theirs, ours, 1e-5)


@pytest.mark.parametrize("name", NEW)
def test_every_new_argument_changes_the_logits(name):
    weights, (tokens, labels) = transformer_weights(**NEW), token_ids()
    one_less = {feature: value for feature, value in NEW.items() if feature != name}
    fewer = {w: x for w, x in weights.items() if w in transformer_weights(**one_less)}
    logits = [
        transformer_on_rank(None, w, tokens, labels, "contiguous", sizes)["logits"]
        for w, sizes in ((weights, NEW), (fewer, one_less))
    ]
    assert np.abs(logits[0] - logits[1]).max() > 1e-3


@pytest.mark.parametrize("name", first(MODELS))
def test_both_frameworks_compute_the_logits_recorded_from_transformers(name):
    theirs = {"logits": np.array(recorded()["logits"][name])}
    assert_near({"logits": torch_logits(name)}, theirs, 1e-5)
    assert_near({"logits": jax_logits(name)}, theirs, 1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_the_record_is_what_transformers_computes(name):
    pytest.importorskip("transformers")
    assert_near({"logits": their_logits(name)}, {"logits": np.array(recorded()["logits"][name])}, 1e-5)


def torch_logits(name: str) -> np.ndarray:
    model = ring_attn_torch.RingTransformer.from_config(config_of(name), layout="contiguous")
    ring_attn_torch.from_numpy(model, weights_of(name))
    return model(torch.from_numpy(ids()))[0, LOOKED_AT].detach().numpy()


def jax_logits(name: str) -> np.ndarray:
    where: dict[str, Any] = {"layout": "contiguous", "mesh": mesh_of(1), "rngs": nnx.Rngs(0)}
    model = from_numpy(ring_attn_jax.RingTransformer.from_config(config_of(name), **where), weights_of(name))
    return np.asarray(jax.jit(lambda tokens: model(tokens))(jnp.asarray(ids())))[0, LOOKED_AT]


def both(config: TransformerConfig) -> list[Any]:
    """The model of a config in both frameworks, read back from JSON."""
    again = TransformerConfig.from_json(config.to_json())
    return [
        ring_attn_jax.RingTransformer.from_config(again, mesh=mesh_of(1), rngs=nnx.Rngs(0)),
        ring_attn_torch.RingTransformer.from_config(again),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("tied", first([True, False]))
def test_a_config_makes_the_same_weights_in_both_frameworks(tied):
    config = TransformerConfig(**TRANSFORMER | NEW, tied=tied, sinks=True, param_dtype="bfloat16", compute_dtype="float32")
    ours, theirs = both(config)
    assert ours.config == theirs.config == config
    expected = {name: x.shape for name, x in transformer_weights(tied, **NEW, sinks=True).items()}
    assert {name: x.shape for name, x in to_numpy(ours).items()} == expected
    assert {name: x.shape for name, x in ring_attn_torch.to_numpy(theirs).items()} == expected
    weights = transformer_weights(tied, **NEW, sinks=True)
    for name, x in to_numpy(from_numpy(ours, weights)).items():
        other = ring_attn_torch.to_numpy(ring_attn_torch.from_numpy(theirs, weights))[name]
        np.testing.assert_array_equal(x, other)


def test_weights_are_kept_and_activations_computed_in_the_dtypes_of_the_config():
    tokens = np.zeros((1, 8), np.int32)
    for kept, computed in (("bfloat16", None), ("bfloat16", "float32"), ("float32", "bfloat16")):
        config = TransformerConfig(**TRANSFORMER | NEW, tied=False, param_dtype=kept, compute_dtype=computed)
        ours, theirs = both(config)
        assert {x.dtype.name for x in jax.tree.leaves(nnx.state(ours, nnx.Param))} == {kept}
        assert {str(x.dtype) for x in theirs.parameters()} == {f"torch.{kept}"}
        assert jax.eval_shape(lambda x, ours=ours: ours(x), jnp.asarray(tokens)).dtype.name == (computed or kept)
        assert str(theirs(torch.from_numpy(tokens)).dtype) == f"torch.{computed or kept}"


def test_dtypes_may_be_named_or_given():
    in_jax: dict[str, Any] = TRANSFORMER | {"param_dtype": jnp.bfloat16, "compute_dtype": jnp.float32}
    in_torch: dict[str, Any] = TRANSFORMER | {"param_dtype": torch.bfloat16, "compute_dtype": torch.float32}
    ours = ring_attn_jax.RingTransformer(**in_jax, rngs=nnx.Rngs(0)).config
    theirs = ring_attn_torch.RingTransformer(**in_torch).config
    assert ours == theirs == TransformerConfig(**TRANSFORMER, param_dtype="bfloat16", compute_dtype="float32")
    unknown: dict[str, Any] = TRANSFORMER | {"param_dtype": "half"}
    with pytest.raises(ValueError, match=r"param_dtype must be one of float32, .*, got 'half'"):
        ring_attn_torch.RingTransformer(**unknown)
    with pytest.raises(ValueError, match=r"param_dtype must be one of float32, .*, got 'half'"):
        ring_attn_jax.RingTransformer(**unknown, rngs=nnx.Rngs(0))


def test_biases_start_at_0_and_norms_at_1():
    for model, package in zip(both(TransformerConfig(**TRANSFORMER | NEW)), (ring_attn_jax, ring_attn_torch), strict=True):
        for name, x in package.to_numpy(model).items():
            if x.ndim == 1:
                np.testing.assert_array_equal(x, float("bias" not in name), err_msg=name)


@pytest.mark.parametrize("name", SCALINGS)
def test_both_frameworks_turn_by_the_frequencies_of_a_scaling_far_out(name):
    head_dim, rotary, _ = SCALINGS[name]
    where = np.array([0, 1, 1023, 4096, 131071, 2**20 - 1], np.int32)
    x = np.random.default_rng(0).standard_normal((1, len(where), 2, head_dim)).astype(np.float32)
    angles = where[:, None, None] * np.array(inverse_frequencies(rotary, head_dim))
    turned = (x[..., : head_dim // 2] + 1j * x[..., head_dim // 2 :]) * np.exp(1j * angles) * attention_factor(rotary)
    exact = np.concatenate([turned.real, turned.imag], -1)
    ours = ring_attn_jax.RotaryEmbedding(head_dim, rotary.base, rotary.scaling)(jnp.asarray(x), jnp.asarray(where))
    theirs = ring_attn_torch.RotaryEmbedding(head_dim, rotary.base, rotary.scaling)(torch.from_numpy(x), torch.from_numpy(where))
    np.testing.assert_allclose(ours, exact, atol=4e-3)
    np.testing.assert_allclose(theirs, exact, atol=4e-3)


@pytest.mark.exhaustive
def test_a_transformer_with_everything_new_compiles_as_one_graph():
    sizes: dict[str, Any] = TRANSFORMER | NEW | {"layout": "contiguous"}
    model = ring_attn_torch.RingTransformer(**sizes)
    tokens = torch.from_numpy(token_ids()[0])
    compiled = torch.compile(lambda x: model(x).square().mean(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens), model(tokens).square().mean())


def test_every_field_of_a_config_is_an_argument_of_the_transformer():
    names = {x.name for x in fields(TransformerConfig)}
    for package in (ring_attn_jax, ring_attn_torch):
        made, loaded = (
            set(inspect.signature(function).parameters)
            for function in (package.RingTransformer.__init__, package.RingTransformer.from_config)
        )
        assert names <= made
        assert made - names - {"self"} == loaded - {"config"}


def test_a_config_with_one_field_replaced_is_another_model():
    config = TransformerConfig(**TRANSFORMER, rotary=Rotary(1e4, Linear(2.0)))
    wider = replace(config, windows=(LENGTH, 3))
    assert [x.attention.config.mask for x in both(wider)[1].blocks] == [wider.attention(i).mask for i in range(2)]
