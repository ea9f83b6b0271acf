"""``ring-attn train`` before a framework comes: its config, its arithmetic, its log, and how it answers a mistake."""

from __future__ import annotations

import json
import math
import re
import tomllib
from dataclasses import fields, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from ring_attn_cli.main import app
from ring_attn_cli.train import arithmetic, data, picture
from ring_attn_cli.train.config import MODEL, Config, Data, Optimizer, Schedule, read
from ring_attn_cli.train.folder import check, differences
from ring_attn_cli.train.loop import Log, lines
from ring_attn_core.model.config import TransformerConfig
from ring_attn_core.model.lora import LoRA

from ..support.selection import first


def config_of(folder: Path, text: str) -> Config:
    path = folder / "config.toml"
    path.write_text(text)
    return read(path)


def test_a_file_changes_what_it_names_and_nothing_else(tmp_path: Path):
    text = "steps = 7\n[optimizer]\nlearning_rate = 1\n[model]\ndim = 64\nwindows = [3, 4]\n[passkey]\nlengths = [200]\n"
    found, usual = config_of(tmp_path, text), Config()
    assert (found.steps, found.optimizer.learning_rate, found.passkey.lengths) == (7, 1.0, (200,))
    assert (found.data, found.ring, found.evaluation) == (usual.data, usual.ring, usual.evaluation)
    assert (found.transformer().dim, found.transformer().windows, found.transformer().heads) == (64, (3, 4), 4)
    assert read(None) == usual
    assert read(None, ranks=2, steps=3, out=None).ring.ranks == 2


def test_the_example_of_the_docs_is_a_config(tmp_path: Path):
    page = (Path(__file__).resolve().parents[2] / "docs" / "train.md").read_text()
    text, *more = re.findall(r"^```toml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    found = config_of(tmp_path, text)
    others = [config_of(tmp_path, each) for each in more]
    assert [other.data.pattern != "*.py" or other.optimizer.schedule for other in others] == [True, True, "wsd", "cosine"]
    assert others[-1].lora is not None and others[-1].lora.scale == 2
    assert found.rows == 2 and found.tokens == 2 * 4 * found.data.length
    rotary = found.transformer().rotary
    assert rotary is not None and rotary.base == 500000.0


def test_the_table_of_the_docs_has_every_key_with_its_default():
    page = (Path(__file__).resolve().parents[2] / "docs" / "train.md").read_text()
    rows = re.findall(r"^\| `([\w.]+)` \| (.+?) \| (.+) \|$", page, re.MULTILINE)
    value = lambda told: None if told == "-" else tomllib.loads(f"x = {told.strip('`')}")["x"]
    told: dict[str, Any] = {key: (told if key == "data.folder" else value(told)) for key, told, _ in rows}
    model = {x.name: MODEL.get(x.name, x.default) for x in fields(TransformerConfig)}
    model["mask"] = json.loads(TransformerConfig(**MODEL).to_json())["mask"]
    told["model.mask"] = {"hi": None, **told["model.mask"]}
    known: dict[str, Any] = {}
    for name, default in (Config().to_dict() | {"model": model}).items():
        known |= {f"{name}.{key}": x for key, x in default.items()} if isinstance(default, dict) else {name: default}
    known.pop("lora")
    known |= {f"lora.{x.name}": None if x.name == "alpha" else x.default for x in fields(LoRA)}
    known["lora.targets"] = list(known["lora.targets"])
    known |= {"data.folder": "Python's standard library", "passkey.lengths": list(known["passkey.lengths"])}
    assert sorted(told.items(), key=itemgetter(0)) == sorted(known.items(), key=itemgetter(0))
    assert all(meaning.strip() for _, _, meaning in rows)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stepz = 7", "the top of the config has no key 'stepz': did you mean 'steps'? it has out, steps"),
        ("[optimizer]\nlearn_rate = 1", "[optimizer] has no key 'learn_rate': did you mean 'learning_rate'?"),
        ("[model]\nhead = 4", "[model] has no key 'head': did you mean 'heads'?"),
        ("[model]\nqqq = 4", "[model] has no key 'qqq': it has vocab, dim"),
        ("[modle]\ndim = 4", "the top of the config has no key 'modle': did you mean 'model'?"),
        ("steps = 7.5", "steps must be an integer, got 7.5"),
        ("steps = true", "steps must be an integer, got True"),
        ("data = 3", "data must be a table, [data], got 3"),
        ("[passkey]\nlengths = 3", "passkey.lengths must be a list of integers, got 3"),
        ("[optimizer]\nlearning_rate = 'x'", "optimizer.learning_rate must be a number, got 'x'"),
        ("[optimizer]\nclip = 0", "optimizer.clip must be more than 0, got 0.0"),
        ("[optimizer]\nlearning_rate = inf", "optimizer.learning_rate must be more than 0 and finite, got inf"),
        ("[optimizer]\nwarmup = -5", "optimizer.warmup must be at least 0 and finite, got -5"),
        ("[optimizer]\nbeta1 = 1.5", "optimizer.beta1 must be at least 0 and below 1, got 1.5"),
        ("[optimizer]\ndecay = nan", "optimizer.decay must be at least 0 and finite, got nan"),
        ("[ring]\nactivations = 'foo'", "activations must be one of keep, recompute, offload, got 'foo'"),
        ("[ring]\nstrategy = 'foo'", "unknown strategy 'foo': choose one of auto, ring"),
        ("[ring]\norder = 'foo'", 'order must be "ring" or "global", got \'foo\''),
        ("[ring]\norder = 'global'\nstrategy = 'direct'", "strategy='direct' adds keys in the order in which they arrive"),
        ("[ring]\nbackend = 'foo'", "unknown backend 'foo': choose \"auto\" or one of hopper"),
        ("steps = 0", "steps must be at least 1, got 0"),
        ("seed = 2147483647", "seed + steps must be at most 2147483647"),
        (f"steps = 1{30 * '0'}", f"steps must be at most 2147483647, got 1{30 * '0'}: pass a smaller one"),
        (f"[passkey]\nlengths = [200, 1{30 * '0'}]", "passkey.lengths must be at most 2147483647, got 1000"),
        (f"[optimizer]\nclip = 1{400 * '0'}", "optimizer.clip must be at most 1.797693135e+308, got 1000"),
        (f"[model]\ndepth = 1{30 * '0'}", "depth must be at most 10000, got 1000"),
        (
            "[data]\nlength = 1023",
            "data.length = 1023 cannot be split by 4 ranks in the layout 'zigzag': make it a multiple of 8",
        ),
        ("[ring]\nlayout = 'spiral'", "unknown layout 'spiral'"),
        (
            "[data]\nlength = 1022\n[ring]\nlayout = 'balanced'",
            "data.length = 1022 cannot be split by 4 ranks in the layout 'balanced': make it a multiple of 4",
        ),
        ("init_from = 'there'\n[model]\ndim = 4", "init_from = 'there' says what the model is, and so does [model]"),
        ("init_from = 'nowhere'", "init_from = 'nowhere' is not a folder with a config.json: pass one"),
        ("init_from = 'before'", "init_from = 'before' is not a folder with a config.json: did you mean 'before/weights'?"),
        ("[data]\nfolder = 'nowhere'", "data: folder='nowhere' does not exist"),
        ("[data]\nfolder = '.'\npattern = '*.none'", "data: no file in . fits pattern='*.none'"),
        ("[data]\nheld_out = '*.none'", "data.held_out: no file in "),
        ("out = 'config.toml'", "out = 'config.toml' is a file: pass a folder"),
        ("out = ''", "out is empty: pass the folder of the run"),
        ("out = 'before'", "before holds a run of jax: go on with --framework jax, or begin another with --out FOLDER"),
        ("[model]\nvocab = 255", "the data have ids from 0 to 255, and the model 255: make model.vocab at least 256"),
        ("[passkey]\nlengths = [20]", "length of a passkey must be an int of at least"),
        ("[passkey]\nlengths = []\ntrain_every = 1\n[data]\nlength = 16", "length of a passkey must be an int of at least"),
        ("[data]\ntokenizer = 'x'", "passkeys are bytes, and data.tokenizer makes other ids: set passkey.lengths = [] and"),
        ("[passkey]\nlengths = []\ntrain_every = 9\n[data]\ntokenizer = 'x'", "passkeys are bytes, and data.tokenizer makes"),
        (
            "[data]\nlength = 8000\nfolder = '.'\npattern = '*.toml'\nheld_out = '*.toml'",
            "data: . holds 72 tokens, and one batch of 4 x 8000 needs 32000: pass",
        ),
        (
            "[optimizer]\nschedule = 'CosineLR'",
            "optimizer.schedule must be one of constant, linear, cosine, wsd, got 'CosineLR': for",
        ),
        ("[optimizer.schedule]\nname = 'StepLR'", "optimizer.schedule must be one of constant, linear, cosine, wsd, got {'name'"),
        ("[optimizer]\ncooldown = 0", "optimizer.cooldown must be more than 0 and at most 1, got 0.0"),
        ("[ring]\nweights = 'split'", "ring.weights must be one of 'whole', 'sharded', got 'split'"),
        ("[data]\ncolumn = 'prompt'", "data: column='prompt' is for .jsonl, .parquet, .arrow files, and "),
        ("steps = ", "is not valid TOML"),
    ],
)
def test_a_mistake_is_answered_in_one_line_before_anything_starts(text: str, words: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.toml").write_text(text)
    for made in ("before/weights", "before/checkpoints/step_50"):
        Path(made).mkdir(parents=True)
    Path("before/weights/config.json").write_text("{}")
    Path("before/checkpoints/step_50/run.json").write_text("{}")
    for package in ("torch", "safetensors"):
        pytest.importorskip(package)
    done = CliRunner().invoke(app, ["train", "config.toml"])
    assert done.exit_code == 2, done.output
    assert words in done.output
    assert len(done.output.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--framework", "numpy"], "unknown framework 'numpy': choose one of torch, jax"),
        (["no.toml"], "there is no no.toml: pass the path of a TOML file"),
        (["--coordinator", "auto"], "--coordinator is for JAX"),
        (["."], ". is a folder: pass the path of a TOML file in it, or none for the defaults"),
        (["--process", "0/2", "--framework", "jax"], "--coordinator None with --process 0/2 says of no process which it is"),
        (["--coordinator", "host:65536", "--process", "0/1"], "--coordinator host:65536 with --process 0/1 says of no process"),
        (["--coordinator", "host:port", "--process", "0/1"], "--coordinator host:port with --process 0/1 says of no process"),
        (["--coordinator", "host:1"], "--coordinator host:1 with --process None says of no process which it is"),
        (["--coordinator", "host:1", "--process", "4/4"], "--coordinator host:1 with --process 4/4 says of no process"),
        (["--ranks", "3"], "data.length = 1024 cannot be split by 3 ranks"),
    ],
)
def test_a_mistake_on_the_command_line_too(arguments: list[str], words: str):
    done = CliRunner().invoke(app, ["train", *arguments])
    assert done.exit_code == 2, done.output
    assert words in done.output


def test_the_rate_warms_up_and_falls_as_a_cosine():
    found = arithmetic.rates(Optimizer(learning_rate=2.0, last_rate=0.1, warmup=4), 15)
    assert found[:4] == [0.5, 1.0, 1.5, 2.0]
    assert found[4] == 2.0
    assert math.isclose(found[9], 1.1)  # half way
    assert math.isclose(found[14], 0.2)
    assert found[4:] == sorted(found[4:], reverse=True)
    assert arithmetic.rates(Optimizer(learning_rate=2.0, warmup=0), 1) == [2.0]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1.0, 2.0, 2.0, 2.0, 2.0, 2.0]),
        ("linear", [1.0, 2.0, 2.0, 1.5, 1.0, 0.5]),
        ("wsd", [1.0, 2.0, 2.0, 2.0, 1.25, 0.5]),
    ],
)
def test_a_rate_warms_up_and_takes_the_course_of_its_schedule(schedule: Schedule, expected: list[float]):
    optimizer = Optimizer(learning_rate=2.0, last_rate=0.25, warmup=2, cooldown=0.5, schedule=schedule)
    assert arithmetic.rates(optimizer, 6) == pytest.approx(expected)


def test_operations_and_peaks_are_those_of_the_formula():
    config = Config(model={"depth": 3, "dim": 64, "heads": 4, "kv_heads": 1, "head_dim": 8}).transformer()
    assert arithmetic.flops_per_token(1000, 50, config) == 6 * 1000 + 3.5 * 2 * 50 * 4 * 8 * 3
    hybrid = replace(config, mixers=["mamba2", "attention", "gated_delta_net"])
    assert arithmetic.flops_per_token(1000, 50, hybrid) == 6 * 1000 + 3.5 * 2 * 50 * 4 * 8
    names = {"NVIDIA H100 80GB HBM3": 989.4, "NVIDIA H100 PCIe": 756.5, "NVIDIA H200": 989.4, "NVIDIA A100-SXM4-80GB": 312.0}
    names |= {"NVIDIA L40S": 362.0, "NVIDIA L4": 121.0, "NVIDIA A10": 125.0, "NVIDIA B200": 2250.0}
    assert {name: arithmetic.peak(name) for name in names} == names
    assert {arithmetic.peak(name) for name in ("cpu", "NVIDIA L40", "NVIDIA A10G", "NVIDIA RTX A1000", "NVIDIA GB200")} == {None}


def test_buckets_end_at_halves_of_the_length():
    assert arithmetic.edges(1024, 4) == [128, 256, 512, 1024]
    assert arithmetic.edges(6, 8) == [1, 3, 6]


def test_first_weights_depend_on_name_and_seed():
    like = {"embed.weight": np.zeros((50, 64)), "a.weight": np.zeros((32, 256), np.float32), "norm.weight": np.zeros(4)}
    like |= {"q.bias": np.ones(4), "sinks": np.ones(2), "conv1d.weight": np.zeros((99, 1, 4))}
    like |= {"a.A_log": np.zeros(3, np.float32), "a.dt_bias": np.zeros(3), "a.D": np.zeros(2)}
    found = arithmetic.first_weights(like, 3)
    assert abs(found["embed.weight"].std() / 0.02 - 1) < 0.05
    assert abs(found["a.weight"].std() * 16 - 1) < 0.05
    assert abs(found["conv1d.weight"].std() * 2 - 1) < 0.1
    assert found["a.weight"].dtype == found["a.A_log"].dtype == np.float32
    losses = 1 - np.exp(-np.exp(found["a.A_log"]) * np.log1p(np.exp(found["a.dt_bias"])))
    np.testing.assert_allclose(losses, [0.001, 0.081, 0.798], atol=1e-3)
    assert found["a.D"].tolist() == [1, 1]
    assert [found[name].tolist() for name in ("norm.weight", "q.bias", "sinks")] == [[1] * 4, [0] * 4, [0] * 2]
    alone = arithmetic.first_weights({"a.weight": like["a.weight"]}, 3)
    np.testing.assert_array_equal(alone["a.weight"], found["a.weight"])
    assert (arithmetic.first_weights(like, 4)["a.weight"] != found["a.weight"]).any()


def test_a_resumed_log_loses_what_came_after_the_checkpoint(tmp_path: Path):
    path, told = tmp_path / "log.jsonl", []
    log = Log(path, 0, lambda kind, line: told.append(kind))
    for step in range(1, 6):
        log("step", step=step, loss=1.0 / step)
    path.write_text(path.read_text() + '{"kind": "st')  # a kill in the middle of a line
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4, 5]
    Log(path, 3, lambda kind, line: None)("step", step=4, loss=0.0)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]
    assert told == ["step"] * 5


def test_changes_of_a_config_are_told_key_by_key():
    before, now = Config(), Config(steps=300, out="elsewhere", optimizer=Optimizer(clip=0.5))
    assert differences(before.to_dict(), now.to_dict()) == ["optimizer.clip was 1.0 and is 0.5", "steps was 200 and is 300"]


def test_documents_that_are_held_out_and_trained_on_are_told(tmp_path: Path):
    for name in ("one.txt", "two.txt", "three.txt"):
        (tmp_path / name).write_text("text " * 3000)

    def both(held_out: str) -> str:
        of = Data(folder=str(tmp_path), pattern="*o*.txt", held_out=held_out)
        return data.check(Config(out=str(tmp_path / "run"), data=of))

    assert [both(x) for x in ("three.txt", "t*.txt", "*.txt")] == ["", "two.txt", "one.txt and 1 more"]


def test_a_missing_held_out_is_asked_for_beside_the_pattern_of_the_user(tmp_path: Path):
    (tmp_path / "one.txt").write_text("text " * 3000)
    of = Data(folder=str(tmp_path), pattern="*.txt")
    with pytest.raises(ValueError, match=r"beside pattern = '\*\.txt' give held_out") as caught:
        data.check(Config(out=str(tmp_path / "run"), data=of))
    assert "asyncio" not in str(caught.value)


@pytest.mark.parametrize("evaluations", first([3, 0, 1], 2))
def test_a_picture_is_drawn_of_any_log(tmp_path: Path, evaluations: int):
    pytest.importorskip("matplotlib")
    log = Log(tmp_path / "log.jsonl", 0, lambda kind, line: None)
    picture.draw(tmp_path / "log.jsonl", tmp_path / "empty.png")
    log("step", step=1, loss=2.0)
    for _ in range(evaluations):
        log("evaluation", step=1, loss=2.0, ends=[1, 2], by_position=[None, 2.0], labels=[0, 3])
    log("passkey", step=1, length=256, accuracy=0.5)
    picture.draw(tmp_path / "log.jsonl", tmp_path / "train.png")
    for name in ("empty.png", "train.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_a_balanced_layout_in_global_order_is_refused_in_jax(tmp_path):
    ring = replace(Config().ring, order="global", layout="balanced")
    config = replace(Config(), out=str(tmp_path), ring=ring)
    check(config, "torch")
    with pytest.raises(ValueError, match="runs no balanced layout in JAX: take another"):
        check(config, "jax")
