"""Weights that a config does not name: a trained head beside a tied config is loaded, and all others are refused by name."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import ring_attn_jax
import ring_attn_torch
from ring_attn_core.model import weight_files

from .jax.ring import mesh_of
from .support.models import TRANSFORMER
from .support.published import LOOKED_AT, config_of, ids, logits_of, weights_of
from .test_weights_parity import in_jax, jax_logits, torch_logits

pytest.importorskip("safetensors")


def test_a_trained_head_beside_a_tied_config_is_loaded_untied(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    from safetensors.numpy import load_file, save_file

    monkeypatch.setattr(weight_files, "SAMPLES", 4)
    ring_attn_jax.save_llama(in_jax(config_of("Qwen3"), weights_of("Qwen3")), tmp_path / "a")
    file = tmp_path / "a" / weight_files.WEIGHTS
    held = load_file(file)
    head = held["model.embed_tokens.weight"].copy()
    head[-1] *= 2  # beyond the first rows that are compared
    save_file(held | {"lm_head.weight": head}, file, {"format": "pt"})
    theirs = logits_of(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a", attn_implementation="eager"))
    for package, logits, ring in ((ring_attn_torch, torch_logits, {}), (ring_attn_jax, jax_logits, {"mesh": mesh_of(1)})):
        model = package.load_llama(tmp_path / "a", layout="contiguous", **ring)
        assert not model.config.tied
        np.testing.assert_allclose(logits(model, ids())[0, LOOKED_AT], theirs, atol=1e-5)
        package.save_llama(model, tmp_path / "b")
        np.testing.assert_array_equal(load_file(tmp_path / "b" / weight_files.WEIGHTS)["lm_head.weight"], head)
        save_file(held | {"lm_head.weight": head[:-1]}, tmp_path / "b" / weight_files.WEIGHTS)
        (tmp_path / "b" / "config.json").write_bytes((tmp_path / "a" / "config.json").read_bytes())
        with pytest.raises(ValueError, match=r"lm_head\.weight is \["):
            package.load_llama(tmp_path / "b")


@pytest.mark.parametrize("name", ["model.layers.0.mlp.gate_proj.scale", "model.lm_head.weight", "lm_head.bias"])
def test_a_weight_that_nothing_reads_is_refused_by_name(name, tmp_path):
    from safetensors.numpy import load_file, save_file

    ring_attn_torch.save_llama(ring_attn_torch.RingTransformer(**TRANSFORMER), tmp_path)
    file = tmp_path / weight_files.WEIGHTS
    held = load_file(file)
    index = {"weight_map": dict.fromkeys(held, "model-00001-of-00001.safetensors")}
    save_file(held | {name: np.ones(2, np.float32)}, file)
    for package in (ring_attn_torch, ring_attn_jax):
        with pytest.raises(ValueError, match=rf"{name} is unexpected"):
            package.load_llama(tmp_path)
    file.rename(tmp_path / "model-00001-of-00001.safetensors")
    (tmp_path / weight_files.INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"{name} is unexpected"):  # it stands in a file, not in the index
        ring_attn_torch.load_llama(tmp_path)


def test_a_model_with_weights_that_its_config_does_not_name_is_refused(tmp_path):
    ours, theirs = ring_attn_jax.RingTransformer(**TRANSFORMER, rngs=nnx.Rngs(0)), ring_attn_torch.RingTransformer(**TRANSFORMER)
    ours.more, theirs.more = nnx.Param(jnp.ones(2)), torch.nn.Parameter(torch.ones(2))  # pyright: ignore[reportAttributeAccessIssue]
    for package, model in ((ring_attn_jax, ours), (ring_attn_torch, theirs)):
        for save in (package.save_weights, package.save_llama):
            with pytest.raises(ValueError, match="more is unexpected"):
                save(model, tmp_path / "a")
    assert not (tmp_path / "a").exists()
