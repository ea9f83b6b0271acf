"""Weights in folders: the same folder in both frameworks, and folders of transformers in and out, on rings of 1, 2 and 4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import ring_attn_jax
import ring_attn_torch
from ring_attn_core.model import replica_check, weight_files, weight_saving
from ring_attn_core.model.config import TransformerConfig
from ring_attn_core.model.rotary import Llama3, Rotary
from ring_attn_core.model.weight_names import llama_name
from ring_attn_jax import to_numpy

from .jax.ring import mesh_of
from .support.models import LENGTH, TRANSFORMER, VOCAB, assert_near, token_ids, transformer_weights
from .support.published import LOOKED_AT, MODELS, TOKENS, config_of, ids, logits_of, recorded, their_model, weights_of
from .support.selection import first, one_of_each
from .support.spawn import PerRank
from .torch.models import rank_in, ranks_of, shard_fully

pytest.importorskip("safetensors")


NEW: dict[str, Any] = {
    "qk_norm": True,
    "qkv_bias": True,
    "sinks": True,
    "tied": False,
    "windows": (7, None),
    "rotary": Rotary(100.0, Llama3(4.0, 1.0, 4.0, 64)),
}


def in_jax(config: TransformerConfig, weights: dict[str, np.ndarray] | None = None) -> Any:
    model = ring_attn_jax.RingTransformer.from_config(config, layout="contiguous", mesh=mesh_of(1), rngs=nnx.Rngs(0))
    return model if weights is None else ring_attn_jax.from_numpy(model, weights)


def jax_logits(model: Any, tokens: np.ndarray, ranks: int = 1) -> np.ndarray:
    layout = model.blocks[0].attention.options.layout
    batch = ring_attn_jax.shard_batch(jnp.asarray(tokens), layout, ranks)
    graph, state = nnx.split(model)
    run = jax.jit(lambda state, ids, positions: nnx.merge(graph, state)(ids, positions, batch.length))
    logits = run(state, batch.ids, batch.positions)
    return np.asarray(ring_attn_jax.from_layout(logits, layout, ranks, tokens.shape[1]).astype(jnp.float32))


def torch_logits(model: Any, tokens: np.ndarray, group: Any = None) -> np.ndarray:
    """Those of this rank, in layout order."""
    layout = model.blocks[0].attention.options.layout
    shard = ring_attn_torch.shard_batch(torch.from_numpy(tokens), layout, ranks_of(group), rank_in(group))
    return model(shard.ids, shard.positions, shard.length).detach().float().numpy()


def torch_llama_on_rank(group: Any, folder: Path) -> np.ndarray:
    return torch_logits(ring_attn_torch.load_llama(folder, group=group), ids(), group)


@pytest.mark.parametrize("dtype", first(["float32", "bfloat16"]))
def test_from_jax_to_torch_and_back_no_bit_changes(tmp_path, dtype):
    config = TransformerConfig(**TRANSFORMER | NEW, param_dtype=dtype)
    weights = transformer_weights(**NEW)
    ours = in_jax(config, weights)
    ring_attn_jax.save_weights(ours, tmp_path / "a")
    theirs = ring_attn_torch.load_weights(tmp_path / "a", layout="contiguous")
    ring_attn_torch.save_weights(theirs, tmp_path / "b")
    again = ring_attn_jax.load_weights(tmp_path / "b", layout="contiguous", mesh=mesh_of(1))
    assert ours.config == theirs.config == again.config == config
    before, between, after = to_numpy(ours), ring_attn_torch.to_numpy(theirs), to_numpy(again)
    for name, x in before.items():
        np.testing.assert_array_equal(x, between[name], err_msg=name)
        np.testing.assert_array_equal(x, after[name], err_msg=name)
    assert before.keys() == between.keys() == after.keys()
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    if dtype == "float32":
        tokens = token_ids()[0]
        assert_near({"logits": torch_logits(theirs, tokens)}, {"logits": jax_logits(again, tokens)}, 1e-5)


def test_the_trained_dtypes_may_be_chosen_anew(tmp_path):
    ring_attn_torch.save_weights(ring_attn_torch.RingTransformer(**TRANSFORMER), tmp_path / "a")
    theirs = ring_attn_torch.load_weights(tmp_path / "a", dtype=torch.bfloat16, compute_dtype="float32")
    ours = ring_attn_jax.load_weights(tmp_path / "a", dtype=jnp.bfloat16, compute_dtype="float32", mesh=mesh_of(2))
    assert {str(p.dtype) for p in theirs.parameters()} == {"torch.bfloat16"}
    assert {x.dtype.name for x in jax.tree.leaves(nnx.state(ours, nnx.Param))} == {"bfloat16"}
    assert {len(x.devices()) for x in jax.tree.leaves(nnx.state(ours, nnx.Param))} == {2}
    assert ours.config == theirs.config
    assert ours.config.compute_dtype == "float32"


def test_a_loaded_model_trains_without_touching_the_file(tmp_path):
    ring_attn_torch.save_weights(ring_attn_torch.RingTransformer(**TRANSFORMER), tmp_path / "a")
    file = tmp_path / "a" / "model.safetensors"
    before = file.read_bytes()
    model = ring_attn_torch.load_weights(tmp_path / "a")
    model(torch.zeros(1, 4, dtype=torch.int32)).sum().backward()
    torch.optim.SGD(model.parameters(), 1.0).step()
    assert all(p.requires_grad and p.grad is not None for p in model.parameters())
    assert file.read_bytes() == before


@pytest.mark.parametrize("name", first(MODELS, 2))
def test_torch_on_a_ring_computes_the_logits_of_transformers(name, gloo, tmp_path, monkeypatch):
    monkeypatch.setattr(weight_saving, "MAX_BYTES", 4000)  # several files and an index
    ring_attn_jax.save_llama(in_jax(config_of(name), weights_of(name)), tmp_path / "a")
    assert len([*(tmp_path / "a").glob("*.safetensors")]) > 3
    expected = {"logits": np.array(recorded()["logits"][name])}
    for ranks in (1, 2, 4):
        shards = torch.from_numpy(np.concatenate(gloo(ranks, torch_llama_on_rank, tmp_path / "a"), 1))
        logits = ring_attn_torch.from_layout(shards, "zigzag", ranks, TOKENS)[0, LOOKED_AT].numpy()
        assert_near({"logits": logits}, expected, 1e-5)


ON_JAX = [("Llama", 2), *((name, 2) for name in MODELS if name != "Llama"), ("Llama", 4), ("Qwen3", 1)]
ON_JAX += [(name, ranks) for name in MODELS for ranks in (1, 4) if (name, ranks) not in ON_JAX]


@pytest.mark.parametrize(("name", "ranks"), first(ON_JAX, most=len(MODELS) + 2))
def test_jax_on_a_ring_computes_the_logits_of_transformers(name, ranks, tmp_path):
    model = ring_attn_torch.RingTransformer.from_config(config_of(name))
    ring_attn_torch.save_llama(ring_attn_torch.from_numpy(model, weights_of(name)), tmp_path / "a")
    loaded = ring_attn_jax.load_llama(tmp_path / "a", mesh=mesh_of(ranks))
    assert loaded.config == config_of(name)
    expected = {"logits": np.array(recorded()["logits"][name])}
    assert_near({"logits": jax_logits(loaded, ids(), ranks)[0, LOOKED_AT]}, expected, 1e-5)


@pytest.mark.parametrize("name", one_of_each(2, MODELS))
def test_folders_of_transformers_are_read_and_written(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = their_model(name)
    assert_near({"logits": logits_of(theirs)}, {"logits": np.array(recorded()["logits"][name])}, 1e-5)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=4000)
    assert (tmp_path / "theirs" / weight_files.INDEX).exists()
    model = ring_attn_torch.load_llama(tmp_path / "theirs", layout="contiguous")
    assert model.config == config_of(name)
    for weight, x in weights_of(name).items():
        np.testing.assert_array_equal(ring_attn_torch.to_numpy(model)[weight], x, err_msg=weight)
        np.testing.assert_array_equal(x, to_numpy(ring_attn_jax.load_llama(tmp_path / "theirs"))[weight], err_msg=weight)
    ring_attn_torch.save_llama(model, tmp_path / "ours")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    assert type(back).__name__ == f"{name}ForCausalLM"
    np.testing.assert_array_equal(logits_of(back), logits_of(theirs))


def test_features_that_transformers_does_not_compute_are_refused_by_name(tmp_path):
    for feature, value in (("sinks", True), ("softcap", 3.0), ("alibi", True), ("rotary_base", None), ("windows", (3, 5))):
        sizes: dict[str, Any] = {**TRANSFORMER, feature: value}
        model = ring_attn_torch.RingTransformer(**sizes)
        with pytest.raises(ValueError, match=rf"{feature}.*save_weights"):
            ring_attn_torch.save_llama(model, tmp_path / "a")
        assert not (tmp_path / "a").exists()


def test_ranks_that_save_wait_for_the_first_and_raise_what_it_raises(gloo, tmp_path):
    assert gloo(2, saved_on_rank, tmp_path / "a") == [None, None]
    assert ring_attn_torch.load_weights(tmp_path / "a").config.vocab == VOCAB
    (tmp_path / "b").write_text("a file")
    gloo.refuse(f"^rank 0: {tmp_path / 'b'} is a file", 2, saved_on_rank, tmp_path / "b")


def saved_on_rank(group: Any, folder: Path) -> None:
    ring_attn_torch.save_weights(ring_attn_torch.RingTransformer(**TRANSFORMER, group=group), folder, group=group)
    assert folder.is_dir()


def test_no_rank_loads_weights_that_one_rank_cannot_load(gloo, tmp_path):
    whole, missing, cut, other = (tmp_path / name for name in ("whole", "missing", "cut", "other"))
    for folder in (whole, cut, other):
        ring_attn_torch.save_weights(ring_attn_torch.RingTransformer(**TRANSFORMER), folder)
    (cut / weight_files.WEIGHTS).write_bytes((whole / weight_files.WEIGHTS).read_bytes()[:-100])
    (other / "config.json").write_text(json.dumps(json.loads((other / "config.json").read_text()) | {"model_type": "llama"}))
    assert gloo(2, loaded_on_rank, whole) == [None, None]
    for theirs, words in ((missing, "is not a folder"), (cut, "is truncated"), (other, "read it with load_llama")):
        gloo.refuse(f"(?s)^rank 1: {theirs}.*{words}", 2, loaded_on_rank, PerRank(whole, theirs))
    gloo.refuse(f"^rank 0: {missing}", 2, loaded_on_rank, PerRank(missing, cut))
    assert gloo(2, loaded_on_rank, whole) == [None, None]


def loaded_on_rank(group: Any, folder: Path) -> None:
    replica_check.PAUSES = ()
    ring_attn_torch.load_weights(folder, group=group)


def test_sharded_and_wrapped_models_are_saved_whole(gloo, tmp_path):
    weights = transformer_weights()
    for kind in ("FSDP2", "compile"):
        gloo(2, wrapped_on_rank, kind, weights, tmp_path / kind)
        found = ring_attn_torch.to_numpy(ring_attn_torch.load_weights(tmp_path / kind))
        assert found.keys() == weights.keys()
        for name, x in weights.items():
            np.testing.assert_array_equal(found[name], x, err_msg=f"{kind}: {name}")


def wrapped_on_rank(group: Any, kind: str, weights: dict[str, np.ndarray], folder: Path) -> None:
    model: Any = ring_attn_torch.from_numpy(ring_attn_torch.RingTransformer(**TRANSFORMER, group=group), weights)
    if kind == "compile":
        model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
        model = torch.compile(model, backend="eager")
    else:
        shard_fully(group, *model.blocks, model)
    ring_attn_torch.save_weights(model, folder, group=group)


def test_a_tied_model_reads_past_a_second_copy_of_its_head(tmp_path):
    from safetensors.numpy import load_file, save_file

    ring_attn_jax.save_llama(in_jax(config_of("Qwen3"), weights_of("Qwen3")), tmp_path / "a")
    file = tmp_path / "a" / weight_files.WEIGHTS
    held = load_file(file)
    assert set(held) == {llama_name(name) for name in weights_of("Qwen3")}
    more = {"lm_head.weight": held["model.embed_tokens.weight"], "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4)}
    save_file(held | more, file)
    assert ring_attn_torch.load_llama(tmp_path / "a").config == config_of("Qwen3")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    (tmp_path / "a" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert ring_attn_torch.load_llama(tmp_path / "a").head is not None


def test_length_is_what_other_programs_allow(tmp_path):
    ring_attn_torch.save_llama(ring_attn_torch.RingTransformer(**TRANSFORMER), tmp_path / "a", length=LENGTH)
    assert json.loads((tmp_path / "a" / "config.json").read_text())["max_position_embeddings"] == LENGTH
