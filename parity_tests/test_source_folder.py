"""save_llama with the folder that the model came from: a folder that takes its place, tokenizer and config included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

import ring_attn_jax
import ring_attn_torch

from .core.test_chat import MARKED, tokenizer_in

pytest.importorskip("tokenizers")


PACKAGES = pytest.mark.parametrize("package", [ring_attn_jax, ring_attn_torch], ids=["jax", "torch"])
SIZES: dict[str, Any] = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "eos_token_id": 2}
OF_THEIRS = {"initializer_range": 0.07, "pretraining_tp": 3, "use_cache": False}
"""Keys of a config that no model of ours decides."""


def their_folder(folder: Path, kind: str = "Llama") -> Path:
    config = getattr(transformers, f"{kind}Config")(**SIZES, **OF_THEIRS)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    said = json.loads((folder / "config.json").read_text())
    said |= {"note": "mine", "auto_map": {"AutoModel": "elsewhere.py"}}
    (folder / "config.json").write_text(json.dumps(said))
    return tokenizer_in(folder, MARKED)


@PACKAGES
def test_a_model_comes_back_with_its_tokenizer_and_its_config(package: Any, tmp_path: Path):
    theirs, ours = their_folder(tmp_path / "theirs"), tmp_path / "ours"
    model = package.load_llama(theirs)
    for _ in range(2):  # the second replaces the first
        package.save_llama(model, ours, source=theirs)
    said, says = (json.loads((folder / "config.json").read_text()) for folder in (theirs, ours))
    kept = OF_THEIRS.keys() & said.keys() | {"note"}
    assert len(kept) > 2
    assert {name: says[name] for name in kept} == {name: said[name] for name in kept}
    assert "auto_map" not in says
    before, after = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (theirs, ours))
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "straße"}]
    assert after.apply_chat_template(chat)["input_ids"] == before.apply_chat_template(chat)["input_ids"]
    back = transformers.AutoModelForCausalLM.from_pretrained(ours)
    assert (back.config.initializer_range, back.config.eos_token_id) == (0.07, 2)
    assert (ours / "generation_config.json").read_bytes() == (theirs / "generation_config.json").read_bytes()
    np.testing.assert_array_equal(
        back.lm_head.weight.detach().numpy(), package.to_numpy(package.load_llama(theirs))["head.weight"]
    )


@PACKAGES
def test_settings_of_the_model_come_from_the_model(package: Any, tmp_path: Path):
    theirs, ours = their_folder(tmp_path / "theirs"), tmp_path / "ours"
    said = json.loads((theirs / "config.json").read_text())
    said.pop("rope_parameters", None)
    said |= {"rope_theta": 777.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "torch_dtype": "float32"}
    (theirs / "config.json").write_text(json.dumps(said))
    package.save_llama(package.load_llama(theirs, dtype="bfloat16"), ours, source=theirs, length=99)
    back = transformers.AutoConfig.from_pretrained(ours)
    assert (back.max_position_embeddings, str(back.dtype)) == (99, "torch.bfloat16")
    assert (back.rope_parameters["rope_theta"], back.rope_parameters["factor"]) == (777.0, 2.0)


@PACKAGES
def test_another_architecture_lends_its_tokenizer_alone(package: Any, tmp_path: Path):
    theirs, ours = their_folder(tmp_path / "theirs", "Qwen2"), tmp_path / "ours"
    sizes: dict[str, Any] = {"vocab": 300, "dim": 16, "depth": 1, "heads": 2}
    rngs = {"rngs": __import__("flax").nnx.Rngs(0)} if package is ring_attn_jax else {}
    package.save_llama(package.RingTransformer(**sizes, **rngs), ours, source=theirs)
    assert "note" not in json.loads((ours / "config.json").read_text())
    assert (ours / "tokenizer.json").read_bytes() == (theirs / "tokenizer.json").read_bytes()


@PACKAGES
def test_a_source_without_a_tokenizer_or_of_another_vocabulary_is_refused(package: Any, tmp_path: Path):
    theirs, ours = their_folder(tmp_path / "theirs"), tmp_path / "ours"
    model = package.load_llama(theirs)
    with pytest.raises(ValueError, match=r"cannot be read .*: pass the folder that load_llama read"):
        package.save_llama(model, ours, source=tmp_path / "nowhere")
    (theirs / "tokenizer.json").rename(theirs / "kept.json")
    with pytest.raises(ValueError, match="has no tokenizer"):
        package.save_llama(model, ours, source=theirs)
    (theirs / "kept.json").rename(theirs / "tokenizer.json")
    said = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps(said | {"vocab_size": 301}))
    with pytest.raises(ValueError, match="has 301 token ids, and the model 300: pass the folder it came from"):
        package.save_llama(model, ours, source=theirs)
    assert not ours.exists()
    package.save_llama(model, ours)
    (ours / "tokenizer.json").write_text("mine")
    with pytest.raises(ValueError, match=r"holds tokenizer.json, which saving would delete"):
        package.save_llama(model, ours)
