"""Folders of weights: replaced whole or not at all, and every damage named."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ring_attn_core.model import weight_saving
from ring_attn_core.model.llama import config_of, their_config
from ring_attn_core.model.rotary import NTK, Linear, Llama3, Rotary, YaRN
from ring_attn_core.model.weight_files import CONFIG, INDEX, WEIGHTS, current, open_folder, own_config, sources
from ring_attn_core.model.weight_saving import replacing, write

from ..support.flushed import unflushed
from ..support.full_disk import full_disk
from ..support.published import config_of as model_of

pytest.importorskip("safetensors")


SHAPES = {"a": (2, 3), "b": (5,)}


def save(folder: Path, value: float = 0.0, **shapes: tuple[int, ...]) -> None:
    from safetensors.numpy import save_file

    with replacing(folder) as new:
        (new / CONFIG).write_text("{}")
        write(new, ((name, np.full(shape, value, np.float32)) for name, shape in (SHAPES | shapes).items()), save_file)


def values(folder: Path) -> set[float]:
    """The values of all weights that ``SHAPES`` promises."""
    found = set()
    with open_folder(folder) as held:
        for file, names in sources(held, SHAPES, str).items():
            found |= {float(x) for name in names.values() for x in held.files[file].weights.get_tensor(name).flat}
    return found


@pytest.mark.parametrize("most", [10**9, 24])
def test_a_folder_is_written_read_and_replaced_in_one_file_or_several(tmp_path, monkeypatch, most):
    monkeypatch.setattr(weight_saving, "MAX_BYTES", most)
    for value in (1.0, 2.0):
        save(tmp_path / "deep" / "w", value)
        assert values(tmp_path / "deep" / "w") == {value}
    assert (tmp_path / "deep" / "w" / INDEX).exists() == (most == 24)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["w"]


def test_a_full_disk_leaves_the_previous_weights_whole(tmp_path):
    save(tmp_path / "w", 1.0)
    with full_disk(100), pytest.raises(OSError, match=r"could not be saved, and what was there before is as it was: .*too large"):
        save(tmp_path / "w", 2.0)
    assert values(tmp_path / "w") == {1.0}
    assert [path.name for path in tmp_path.iterdir()] == ["w"]


@pytest.mark.parametrize("before", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, ZeroDivisionError])
def test_an_interrupt_leaves_what_was_there(tmp_path, kind, before):
    if before:
        save(tmp_path / "w", 1.0)
    with pytest.raises(kind), replacing(tmp_path / "w"):
        raise kind
    assert [path.name for path in tmp_path.iterdir()] == ["w"] * before
    assert not before or values(tmp_path / "w") == {1.0}


KILLED = """
import os, pathlib, signal, sys
import numpy as np
from safetensors.numpy import load_file, save_file
from ring_attn_core.model.weight_files import WEIGHTS, current
from ring_attn_core.model.weight_saving import replacing, write

folder, calls = pathlib.Path(sys.argv[1]), 0

def save(value):
    with replacing(folder) as new:
        write(new, [("a", np.full((2, 3), value))], save_file)

def dying(function):
    def call(*arguments, **keywords):
        global calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **keywords)
    return call

for at in range(1, 99):
    save(1.0)
    child = os.fork()
    if child == 0:
        for where, name in (pathlib.Path, "rename"), (pathlib.Path, "mkdir"), (os, "fsync"), (os, "rmdir"):
            setattr(where, name, dying(getattr(where, name)))
        save(2.0)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(load_file(current(folder) / WEIGHTS)["a"].mean())
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
save(3.0)
"""


def test_a_kill_at_any_step_leaves_the_old_or_the_new_weights_whole(tmp_path):
    """Steps are what a save does to the disk: it makes a folder, waits for the disk, renames and deletes."""
    command = [sys.executable, "-c", KILLED, str(tmp_path / "w")]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen = [float(value) for value in done.stdout.split()]
    new = seen.index(2.0)
    assert seen == [1.0] * new + [2.0] * (len(seen) - new)
    assert new > 5
    assert [path.name for path in tmp_path.iterdir()] == ["w"]


def test_nothing_else_is_ever_deleted(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds notes\.txt, which saving would delete"):
        save(tmp_path)
    (tmp_path / "notes.txt").rename(tmp_path / "adapter.safetensors")
    with pytest.raises(ValueError, match=r"holds adapter\.safetensors"):
        save(tmp_path)
    with pytest.raises(ValueError, match=r"adapter\.safetensors is a file: weights are saved as a folder"):
        save(tmp_path / "adapter.safetensors")
    assert (tmp_path / "adapter.safetensors").read_text() == "mine"


@pytest.mark.parametrize("kept", [0, 5, 40, -1])
def test_a_truncated_file_is_named(tmp_path, kept):
    save(tmp_path / "w")
    file = tmp_path / "w" / WEIGHTS
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ValueError, match=rf"{WEIGHTS} of \d+ bytes is truncated or no safetensors file"):
        values(tmp_path / "w")


def test_weights_are_on_the_disk_before_their_folder_has_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_saving, "MAX_BYTES", 24)
    save(tmp_path / "w")
    with unflushed() as lost:
        save(tmp_path / "w", 1.0)
    assert not [path for path in lost if not path.startswith(str(tmp_path / "w"))]  # the one before has been there for long


def test_weights_that_are_quantised_are_refused(tmp_path):
    from safetensors.numpy import save_file

    save(tmp_path / "w")
    save_file({"a": np.zeros((2, 3), np.int8), "b": np.zeros(5, np.float32)}, tmp_path / "w" / WEIGHTS)
    with pytest.raises(ValueError, match=r"w holds a is I8: weights must be F32, BF16, F16, F64, .* before it was quantised"):
        values(tmp_path / "w")


def test_weights_that_do_not_fit_are_named(tmp_path):
    save(tmp_path / "w", b=(7,), c=(1,), d=(2,))
    with pytest.raises(ValueError, match=r"w holds does not fit this module: c is unexpected; d is unexpected; b is \[7\] and"):
        values(tmp_path / "w")
    more = pytest.raises(ValueError, match=r"other\.0 is missing; .*; and 96 more\. Are config\.json and the weights")
    with more, open_folder(tmp_path / "w") as held:
        sources(held, {f"other.{i}": (1,) for i in range(100)}, str)


def test_a_folder_that_lacks_something_says_what(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"none is not a folder: pass one with config\.json and model\.safetensors in it"):
        current(tmp_path / "none")
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        values(tmp_path)
    (tmp_path / CONFIG).write_text("{}")
    with pytest.raises(ValueError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json$"):
        values(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"pickles such as pytorch_model\.bin are never read"):
        values(tmp_path)
    monkeypatch.setattr(weight_saving, "MAX_BYTES", 24)
    save(tmp_path / "w")
    first = tmp_path / "w" / "model-00001-of-00002.safetensors"
    first.write_bytes((tmp_path / "w" / "model-00002-of-00002.safetensors").read_bytes())
    with pytest.raises(
        ValueError, match=r"model-00001-of-00002\.safetensors lacks a, which model\.safetensors\.index\.json prom"
    ):
        values(tmp_path / "w")
    first.unlink()
    with pytest.raises(ValueError, match=r"model-00001-of-00002\.safetensors is missing"):
        values(tmp_path / "w")
    for bad in ({"weight_map": {"a": "../secret.safetensors"}}, {"weight_map": []}, {}):
        (tmp_path / "w" / INDEX).write_text(json.dumps(bad))
        with pytest.raises(ValueError, match="must hold a weight_map"):
            values(tmp_path / "w")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "must hold a JSON object, got a list"),
        ('{"vocab": 3, "speed": 1}', r"config\.json: TransformerConfig has no 'speed'"),
        ('{"vocab": 3}', r"config\.json: TransformerConfig needs 'dim', 'depth', 'heads'"),
        ('{"model_type": "llama"}', r"is one of Hugging Face's, of a llama model: read it with load_llama"),
    ],
)
def test_a_config_that_cannot_be_read_says_why(tmp_path, text, message):
    save(tmp_path / "w")
    (tmp_path / "w" / CONFIG).write_text(text)
    with pytest.raises(ValueError, match=message), open_folder(tmp_path / "w") as held:
        own_config(held)


LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 31,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "gemma3"}, "model_type must be one of llama, mistral, qwen2, qwen3, got 'gemma3'"),
        ({"model_type": None, "vocab": 31}, "read it with load_weights"),
        ({"hidden_act": "gelu"}, "hidden_act of a llama model must be 'silu', got 'gelu'"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings of a llama model must be true or false, got 'no'"),
        ({"eos_token_id": 2.0}, "eos_token_id of a llama model must be an int or a list of ints, got 2.0"),
        ({"attention_bias": 1}, "attention_bias of a llama model must be true or false, got 1"),
        ({"quantization_config": {"bits": 4}}, "quantization_config of a llama model must be None"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_type must be default, linear, llama3 or yarn, got 'dynamic'",
        ),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "'llama3' needs low_freq_factor, high_freq_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "must be one for all layers, got full_attention"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "whole heads, got partial_rotary_factor 0.5"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers must be an int"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10000, got 1000000000"),
        ({"model_type": ["llama"]}, r"model_type must be one of .*, got \['llama'\]"),
        ({"attention_dropout": "0.1"}, "attention_dropout of a llama model must be a number, got '0.1': restore config.json"),
        ({"rope_scaling": "linear"}, "rope_scaling of a llama model must be an object, got 'linear'"),
        ({"layer_types": 3}, "layer_types of a llama model must be a list of one text a layer, got 3"),
        ({"rope_scaling": {"type": "yarn"}, "max_position_embeddings": None}, "rope_type 'yarn' needs factor, got"),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": "9"}}, "embeddings must be an int .*, got '9'"),
        ({"num_key_value_heads": 3}, "kv_heads=3 must divide heads=4"),
    ],
)
def test_a_config_that_our_layers_do_not_compute_is_refused_by_name(changed, message):
    assert config_of(LLAMA).depth == 3
    with pytest.raises(ValueError, match=message):
        config_of(LLAMA | changed)


def test_a_config_without_a_size_is_refused():
    with pytest.raises(ValueError, match="the config of a llama model must have hidden_size, intermediate_size"):
        config_of({name: x for name, x in LLAMA.items() if name not in ("hidden_size", "intermediate_size")})


@pytest.mark.parametrize(
    "rotary",
    [
        Rotary(500.0),
        Rotary(1e6, Linear(2.0)),
        Rotary(5e5, Llama3(8.0, 1.0, 4.0, 8192)),
        Rotary(1e6, YaRN(4.0, 32768)),
        Rotary(1e4, YaRN(40.0, 4096, 16.0, 2.0, None, 1.0, 0.7, False)),
    ],
    ids=lambda rotary: type(rotary.scaling).__name__,
)
@pytest.mark.parametrize("old", [False, True], ids=["rope_parameters", "rope_scaling"])
def test_every_rotary_embedding_comes_back(rotary, old):
    theirs = their_config(replace(config_of(LLAMA), rotary=rotary, rotary_base=rotary.base), 64)
    theirs.pop("rope_parameters" if old else "rope_scaling", None)
    assert config_of(theirs).rotary == rotary


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_every_family_comes_back(name):
    theirs = their_config(model_of(name), 64)
    assert theirs["model_type"] == name.lower()
    assert config_of(theirs) == model_of(name)
    old = {key: x for key, x in theirs.items() if key != "layer_types"}  # before layer_types, windows began with some layer
    assert config_of(old) == model_of(name)


def test_ntk_is_refused_by_name():
    config = replace(config_of(LLAMA), rotary=Rotary(1e4, NTK(2.0)))
    with pytest.raises(ValueError, match="computes the scaling NTK: keep this model with save_weights"):
        their_config(config, 64)
