"""Biases of Hugging Face's Llama and Qwen3, and what their configs say for other programs: read, computed and written back."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

import ring_attn_jax
import ring_attn_torch
from ring_attn_core.model.config import TransformerConfig
from ring_attn_core.model.llama import config_of, their_config
from ring_attn_core.model.published import Published
from ring_attn_core.model.weight_names import llama_name

from .jax.ring import mesh_of
from .support.models import VOCAB, assert_near, transformer_weights
from .support.published import SIZES, THEIR_SIZES, ids
from .support.selection import first
from .torch.models import rank_in, ranks_of

pytest.importorskip("safetensors")


ATTENTION, MLP = {"qkv_bias": True, "o_bias": True}, {"mlp_bias": True}
BIASED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Llama attention": ("Llama", ATTENTION, {"attention_bias": True}),
    "Llama MLP": ("Llama", MLP, {"mlp_bias": True}),
    "Llama both": ("Llama", ATTENTION | MLP, {"attention_bias": True, "mlp_bias": True}),
    "Qwen3 attention": ("Qwen3", ATTENTION | {"qk_norm": True}, {"attention_bias": True}),
    "Qwen2": ("Qwen2", {"qkv_bias": True}, {}),
}
"""The architecture, and what our config and theirs say of biases."""

SAYS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": [2, 5], "pad_token_id": 0, "max_position_embeddings": 64}


def config(name: str) -> TransformerConfig:
    return TransformerConfig(vocab=VOCAB, tied=False, **SIZES, **BIASED[name][1])


def their_model(name: str) -> Any:
    kind, _, biases = BIASED[name]
    parameters = {"rope_type": "default", "rope_theta": 10000.0}
    theirs = THEIR_SIZES | SAYS | biases | {"rope_parameters": parameters, "tie_word_embeddings": False}
    made = import_module("transformers").AutoConfig.for_model(kind.lower(), **theirs)
    made._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForCausalLM")(made).eval()
    weights = transformer_weights(**config(name).arguments)
    model.load_state_dict({llama_name(weight): torch.from_numpy(x) for weight, x in weights.items()})
    return model


def expected(name: str, model: Any) -> dict[str, np.ndarray]:
    """Logits of transformers, and the gradient of their sum of squares, under our names."""
    logits = model(torch.from_numpy(ids()).long()).logits
    logits.square().sum().backward()
    theirs = {weight: p.grad.numpy() for weight, p in model.named_parameters()}
    return {weight: theirs[llama_name(weight)] for weight in transformer_weights(**config(name).arguments)} | {
        "logits": logits.detach().numpy()
    }


def assert_near_theirs(got: dict[str, np.ndarray], name: str, theirs: Any) -> None:
    """Assert that results differ from those of transformers in float64 by 1e-5, or by eight times what transformers itself does.

    The gradient of the last block's k_norm is a small remainder of large terms: float32 of transformers misses it by 5.4e-6 in
    norm, and ours by 1e-6 to 2e-5, as the order of the sums falls. Everything else stays below 6e-6.
    """
    exact, rounded = expected(name, their_model(name).double()), expected(name, theirs)
    assert got.keys() == exact.keys()
    for weight, value in exact.items():
        rounding = float(np.linalg.norm(rounded[weight] - value) / np.linalg.norm(value))
        assert_near({weight: got[weight]}, {weight: value}, max(1e-5, 8 * rounding))


def in_torch(group: Any, folder: Any) -> dict[str, np.ndarray]:
    """The same of this rank."""
    model = ring_attn_torch.load_llama(folder, group=group)
    shard = ring_attn_torch.shard_batch(torch.from_numpy(ids()), "zigzag", ranks_of(group), rank_in(group))
    logits = model(shard.ids, shard.positions, shard.length)
    (logits * (shard.positions < shard.length)[..., None]).square().sum().backward()
    ring_attn_torch.sum_gradients(model, group=group)
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    return gradients | {"logits": logits.detach().numpy()}


@pytest.mark.parametrize("name", BIASED)
def test_torch_computes_logits_and_gradients_of_transformers(name, gloo, tmp_path):
    theirs = their_model(name)
    theirs.save_pretrained(tmp_path / "theirs")
    found = gloo(2, in_torch, tmp_path / "theirs")
    shards = torch.from_numpy(np.concatenate([each["logits"] for each in found], 1))
    logits = ring_attn_torch.from_layout(shards, "zigzag", 2, ids().shape[1]).numpy()
    assert_near_theirs(found[0] | {"logits": logits}, name, theirs)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", first(["Llama both", "Qwen3 attention", "Qwen2", "Llama attention", "Llama MLP"], most=3))
def test_jax_computes_logits_and_gradients_of_transformers(name, tmp_path):
    theirs = their_model(name)
    theirs.save_pretrained(tmp_path / "theirs")
    model = ring_attn_jax.load_llama(tmp_path / "theirs", mesh=mesh_of(2))
    batch = ring_attn_jax.shard_batch(jnp.asarray(ids()), "zigzag", 2)
    held = (batch.positions < batch.length)[..., None]

    def squares(model: Any) -> Any:
        logits = model(batch.ids, batch.positions, batch.length)
        return (jnp.where(held, logits, 0) ** 2).sum(), logits

    (_, logits), grads = nnx.jit(nnx.value_and_grad(squares, has_aux=True))(model)
    found = ring_attn_jax.to_numpy(nnx.merge(nnx.graphdef(model), nnx.state(model)))
    gradients = ring_attn_jax.to_numpy(_with(model, grads))
    assert found.keys() == gradients.keys()
    whole = ring_attn_jax.from_layout(logits, "zigzag", 2, ids().shape[1])
    assert_near_theirs(gradients | {"logits": np.asarray(whole)}, name, theirs)


def _with(model: Any, state: Any) -> Any:
    """The model with other values for its weights."""
    other = nnx.clone(model)
    nnx.update(other, state)
    return other


@pytest.mark.pairs
@pytest.mark.parametrize("name", BIASED)
@pytest.mark.parametrize("package", [ring_attn_jax, ring_attn_torch], ids=["jax", "torch"])
def test_a_folder_of_transformers_comes_back_with_biases_ids_and_length(name, package, tmp_path):
    theirs = their_model(name)
    theirs.save_pretrained(tmp_path / "theirs")
    package.save_weights(package.load_llama(tmp_path / "theirs"), tmp_path / "kept")
    model = package.load_weights(tmp_path / "kept")
    assert model.config == config(name)
    package.save_llama(model, tmp_path / "ours")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    assert {key: getattr(back.config, key) for key in SAYS} == SAYS
    assert type(back) is type(theirs)
    for weight, x in theirs.state_dict().items():
        np.testing.assert_array_equal(back.state_dict()[weight].numpy(), x.numpy(), err_msg=weight)
    package.save_llama(model, tmp_path / "ours", length=7)
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["max_position_embeddings"] == 7


def test_missing_keys_of_a_config_have_their_defaults():
    said = their_config(TransformerConfig(vocab=31, dim=8, depth=1, heads=2))
    assert said["max_position_embeddings"] == 131072
    assert {said[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")} == {None}


@pytest.mark.parametrize("biases", [{"o_bias": True}, {"qkv_bias": True, "mlp_bias": True}, ATTENTION | {"windows": (3, 3)}])
def test_biases_that_no_architecture_has_are_refused_by_name(biases):
    with pytest.raises(ValueError, match=r"no Llama, Mistral, Qwen2 or Qwen3 computes .*bias.* keep this model"):
        their_config(TransformerConfig(vocab=31, dim=8, depth=2, heads=2, **biases))


@pytest.mark.parametrize("kind", ["mistral", "qwen2"])
def test_a_bias_that_the_architecture_does_not_have_is_refused(kind):
    theirs = their_config(TransformerConfig(vocab=31, dim=8, depth=2, heads=2)) | {"model_type": kind, "mlp_bias": True}
    with pytest.raises(ValueError, match=f"mlp_bias of a {kind} model must be False, got True"):
        config_of(theirs)


def test_an_older_config_is_read_and_what_is_published_makes_no_other_model():
    config = TransformerConfig(vocab=31, dim=8, depth=1, heads=2)
    text = json.loads(config.to_json())
    for name in ("o_bias", "mlp_bias", "published"):
        del text[name]
    assert TransformerConfig.from_json(json.dumps(text)) == config
    said = replace(config, published=Published(eos_token_id=(2, 5)))
    assert said == config
    assert TransformerConfig.from_json(said.to_json()).published == Published(eos_token_id=(2, 5))
    wrongs: tuple[dict[str, Any], ...] = (
        {"eos_token_id": "2"},
        {"bos_token_id": True},
        {"max_position_embeddings": 0},
        {"pad_token_id": 1.5},
    )
    for wrong in wrongs:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Published(**wrong)
