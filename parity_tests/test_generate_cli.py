"""``ring-attn generate`` writes the same text from the same weights in both frameworks, on one rank and on two."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ring_attn_cli.generate.run import speed
from ring_attn_cli.generate.settings import GenerateSettings
from ring_attn_cli.generate.text import Text
from ring_attn_cli.main import app
from ring_attn_torch import RingTransformer, save_llama, save_weights

from .support import warm
from .support.programs import environment

pytest.importorskip("safetensors")


PROMPT = "Ein Märchen, "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights as ``ring-attn train`` leaves them, the same as a Llama, and a prompt."""
    place = tmp_path_factory.mktemp("generate")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"heads": 2, "kv_heads": 1, "hidden": 24, "windows": (9,), "param_dtype": "float64"}
    model = RingTransformer(256, 16, 1, **sizes)
    save_weights(model, place / "weights")
    save_llama(model, place / "llama")
    (place / "prompt.txt").write_text(PROMPT, encoding="utf-8")
    return place


def given(folder: Path, *options: str, weights: str = "weights") -> list[str]:
    return ["generate", "--weights", str(folder / weights), "--prompt-file", str(folder / "prompt.txt"), *options]


def expected(folder: Path, **arguments: Any) -> str:
    from ring_attn_torch import load_weights

    new = load_weights(folder / "weights").generate([list(PROMPT.encode())], 12, **arguments)[0]
    return bytes(new).decode(errors="replace") + "\n"


@pytest.mark.slow
def test_the_text_is_the_models_and_a_mistake_is_one_line(folder, warm_workers):
    drawn = "--max-new-tokens", "12", "--ranks", "2", "--chunk", "8", "--temperature", "1", "--top-k", "50"
    done = CliRunner().invoke(app, given(folder, *drawn))
    assert done.exit_code == 0, done.output
    assert done.stdout == expected(folder, temperature=1.0, top_k=50)
    assert "weights on 2 x cpu" in done.stderr
    assert f"{len(PROMPT.encode())} of {len(PROMPT.encode())} tokens" in done.stderr
    assert re.search(r"12 tokens, the first after \d+\.\d\d s, from number 4 on [\d,]+\.\d tokens/s, ", done.stderr)
    for options, message in (
        (("--top-p", "2"), "top_p must be a number above 0"),
        (("--top-k", "5"), "top_k=5, top_p=None have no effect on it: set a temperature"),
        (("--stop", "300"), "--stop holds 300, and a vocabulary of 256 has 0 to 255"),
        (("--framework", "numpy"), "unknown framework"),
        (("--shard-weights",), "in PyTorch each rank holds all weights: pass --framework jax"),
    ):
        refused = CliRunner().invoke(app, given(folder, *options))
        assert refused.exit_code == 2
        assert refused.stderr.splitlines()[-1].startswith("ring-attn: ")
        assert message in refused.stderr


@pytest.mark.parametrize(
    ("weights", "option"),
    [pytest.param("llama", (), marks=pytest.mark.exhaustive), ("weights", ("--shard-weights",))],
    ids=["llama", "sharded"],
)
def test_jax_writes_the_same_text_also_of_a_folder_of_hugging_faces_and_of_sharded_weights(folder, weights, option):
    pytest.importorskip("jax")
    drawn = "--max-new-tokens", "12", "--framework", "jax", "--ranks", "2", "--temperature", "1", "--seed", "3"
    command = ["-m", "ring_attn_cli.main", *given(folder, *drawn, *option, weights=weights)]
    variables = environment({"XLA_FLAGS": warm.QUICK, "JAX_NUM_CPU_DEVICES": "2"})
    assert warm.run(command, "jax", folder, variables) == expected(folder, temperature=1.0, seed=3)


def test_an_invalid_folder_or_prompt_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="is not a folder with a config"):
        GenerateSettings(weights=tmp_path, prompt_file=folder / "prompt.txt")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match="is empty"):
        Text(GenerateSettings(weights=folder / "weights", prompt_file=tmp_path / "empty.txt"))
    (tmp_path / "latin.txt").write_bytes("ä".encode("latin-1"))
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        Text(GenerateSettings(weights=folder / "weights", prompt_file=tmp_path / "latin.txt"))
    with pytest.raises(ValueError, match="--ranks must be at least 1"):
        GenerateSettings(weights=folder / "weights", prompt_file=folder / "prompt.txt", ranks=0)
    with pytest.raises(ValueError, match="--dtype must be one of float32, bfloat16, float16, float64, got 'int8'"):
        GenerateSettings(weights=folder / "weights", prompt_file=folder / "prompt.txt", dtype="int8")


def test_ids_outside_the_vocabulary_are_refused_before_weights_are_loaded(folder, tmp_path):
    """Call the command in a folder without weights."""
    config = {"vocab": 128}, {"vocab_size": 128, "model_type": "llama", "eos_token_id": [2, 128]}
    for each in config:
        (tmp_path / "config.json").write_text(json.dumps(each))
        with pytest.raises(ValueError, match=r"prompt.txt, read as bytes, holds 195, and a vocabulary of 128 has 0 to 127"):
            Text(GenerateSettings(weights=tmp_path, prompt_file=folder / "prompt.txt", stop=(2,)))
        with pytest.raises(ValueError, match="--stop holds -1, and a vocabulary of 128"):
            GenerateSettings(weights=tmp_path, prompt_file=folder / "prompt.txt", stop=(2, -1))
    with pytest.raises(ValueError, match=r"eos_token_id of config.json holds 128, and a vocabulary of 128"):
        GenerateSettings(weights=tmp_path, prompt_file=folder / "prompt.txt")


def test_the_speed_is_of_tokens_that_wait_for_nothing_but_their_step():
    came = [5.0, 9.0, 10.0, 10.5, 11.0, 11.5]
    assert speed(2.0, came) == "6 tokens, the first after 3.00 s, from number 4 on 2.0 tokens/s, 500.0 ms a token"
    assert speed(2.0, came[:3]) == "3 tokens, the first after 3.00 s"


def test_characters_of_several_tokens_come_whole(folder, tmp_path):
    text = Text(GenerateSettings(weights=folder / "weights", prompt_file=folder / "prompt.txt"))
    assert text.ids == list(PROMPT.encode())
    assert [text.add(x) for x in "aä€".encode()] == ["a", "", "ä", "", "", "€"]
    assert text.add(300) == "" and text.add(0xC3) == "" and text.end() == "\ufffd"


def test_a_tokenizer_beside_the_weights_is_used(folder, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([PROMPT] * 4, trainer)
    made.save(str(path))
    (tmp_path / "config.json").write_text(json.dumps({"vocab": 270}))
    text = Text(GenerateSettings(weights=tmp_path, prompt_file=folder / "prompt.txt"))
    with pytest.raises(ValueError, match=r"tokenizer.json, holds \d+, and a vocabulary of 256 has 0 to 255"):
        Text(GenerateSettings(weights=folder / "weights", prompt_file=folder / "prompt.txt", tokenizer=path))
    assert 1 < len(text.ids) < len(PROMPT.encode())
    assert "".join(text.add(x) for x in [*text.ids, *text.ids]) == PROMPT * 2
