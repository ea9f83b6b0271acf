"""``ring-attn train`` with ``[lora]``: both frameworks train the same adapters, resume to the bit, and merge what peft adds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from typer.testing import CliRunner

from ring_attn_cli.main import app
from ring_attn_cli.train import run
from ring_attn_cli.train.arithmetic import first_adapters, first_weights, flops_per_token
from ring_attn_cli.train.config import Config, Data, Evaluation, Optimizer, Passkeys, RingConfig
from ring_attn_cli.train.folder import check
from ring_attn_cli.train.loop import lines
from ring_attn_core.model.lora import LoRA, widths
from ring_attn_core.model.weight_names import llama_name
from ring_attn_torch import RingTransformer, from_numpy, load_weights, save_llama, to_numpy

from .support import corpus
from .support.selection import first
from .test_train_parity import numbers, on_ranks, weights, work

pytest.importorskip("orbax.checkpoint")


CLOSE = 1e-5
"""The largest relative difference of losses in float32."""
ADAPTERS = LoRA(rank=3, alpha=6.0, targets=("v", "q", "o", "down"))
MODEL: dict[str, Any] = {"vocab": 256, "dim": 16, "depth": 2, "heads": 2, "kv_heads": 1, "hidden": 24, "qkv_bias": True}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of a small Qwen2."""
    folder = tmp_path_factory.mktemp("base")
    model = RingTransformer(**MODEL)
    save_llama(from_numpy(model, first_weights(to_numpy(model), 5)), folder / "model")
    corpus.write_texts(folder / "data", (700, 61, 1, 900, 100, 3, 1300))
    return folder


def config_of(base: Path, out: Path, **ring: Any) -> Config:
    return Config(
        out=str(out),
        steps=3,
        save_every=2,
        init_from=str(base / "model"),
        lora=ADAPTERS,
        data=Data(folder=str(base / "data"), pattern="**/*.txt", held_out="**/*.txt", length=48, batch_size=1, accumulate=2),
        optimizer=Optimizer(learning_rate=2e-2, warmup=0, schedule="constant"),
        ring=replace(RingConfig(ranks=2, chunk=20), **ring),
        evaluation=Evaluation(every=3, batches=1, buckets=2),
        passkey=Passkeys(lengths=()),
    )


@pytest.fixture(scope="module")
def expected(base: Path, gloo, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """The config of a finished run on one rank of PyTorch."""
    config = config_of(base, tmp_path_factory.mktemp("one") / "run", ranks=1)
    gloo(1, on_ranks, config)
    return config


def adapters(config: Config) -> dict[str, np.ndarray]:
    return load_file(Path(config.out, "adapters", "adapter_model.safetensors"))


@pytest.mark.parametrize(
    "ring",
    [
        {"weights": "sharded", "layout": "balanced"},
        pytest.param({"activations": "recompute", "replicas": 1}, marks=pytest.mark.slow),
    ],
    ids=["sharded", "whole"],
)
@pytest.mark.parametrize("framework", first(["torch", "jax"]))
def test_two_ranks_train_the_adapters_of_one(framework: str, ring: dict[str, Any], base: Path, expected, gloo, tmp_path: Path):
    config = config_of(base, tmp_path / "run", **ring)
    work(framework, gloo, config)
    for name in ("losses", "norms", "held out"):
        np.testing.assert_allclose(numbers(config)[name], numbers(expected)[name], rtol=CLOSE, err_msg=name)
    for found, wanted in ((adapters(config), adapters(expected)), (weights(config), weights(expected))):
        assert found.keys() == wanted.keys()
        for name, x in wanted.items():
            np.testing.assert_allclose(found[name], x, rtol=1e-3, atol=1e-4, err_msg=name)


def test_merged_weights_are_the_base_and_the_product_of_the_adapters(base: Path, expected):
    before, merged, of = load_file(base / "model" / "model.safetensors"), weights(expected), adapters(expected)
    targets = 0
    for name, x in merged.items():
        theirs = llama_name(name)
        kept, module = before[theirs].astype(np.float64), "base_model.model." + theirs.removesuffix(".weight")
        if f"{module}.lora_A.weight" in of:
            targets += 1
            a, b = (of[f"{module}.lora_{each}.weight"].astype(np.float64) for each in "AB")
            assert np.abs(b).max() > 1e-3  # it was trained
            np.testing.assert_allclose(x, kept + ADAPTERS.alpha / ADAPTERS.rank * b @ a, atol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(x, before[theirs], err_msg=name)
    assert targets == len(ADAPTERS.targets) * MODEL["depth"] and len(of) == 2 * targets


def test_peft_adds_the_adapters_to_the_same_logits(base: Path, expected):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    ids = torch.arange(40)[None] * 7 % 256
    theirs = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base / "model"), str(Path(expected.out, "adapters"))
    )
    with torch.no_grad():
        ours = load_weights(Path(expected.out, "weights"))(ids)
        torch.testing.assert_close(theirs(ids).logits, ours, rtol=1e-4, atol=1e-4)
        assert (theirs.base_model.model.lm_head(torch.zeros(1, MODEL["dim"])) == 0).all()


def test_the_first_step_computes_the_base_and_its_weights_are_counted_as_frozen(base: Path, expected, gloo, tmp_path: Path):
    plain = replace(config_of(base, tmp_path / "plain", ranks=1), lora=None, steps=1)
    gloo(1, on_ranks, plain)
    assert numbers(plain)["losses"][0] == numbers(expected)["losses"][0]
    (run,) = (line for line in lines(Path(expected.out, "log.jsonl")) if line["kind"] == "run")
    (whole,) = (line for line in lines(Path(plain.out, "log.jsonl")) if line["kind"] == "run")
    assert run["trained"] == sum(x.size for x in adapters(expected).values())
    assert run["frozen"] == whole["parameters"] == whole["trained"] and whole["frozen"] == 0
    assert run["parameters"] == run["trained"] + run["frozen"]
    model = RingTransformer(**MODEL).config
    assert flops_per_token(100, 8, model) - flops_per_token(100, 8, model, 30) == 60


@pytest.mark.parametrize("framework", first(["torch", "jax"]))
def test_a_run_resumes_to_the_same_bits_and_refuses_other_adapters(framework: str, base: Path, gloo, tmp_path: Path):
    whole, resumed = (config_of(base, tmp_path / name, weights="sharded") for name in ("whole", "resumed"))
    work(framework, gloo, whole)
    work(framework, gloo, replace(resumed, steps=2))
    for other, words in (
        (LoRA(rank=4, alpha=6.0, targets=ADAPTERS.targets), "lora.rank was 3 and is 4"),
        (LoRA(rank=3, targets=ADAPTERS.targets), "lora.alpha was 6.0 and is 3.0"),
        (LoRA(rank=3, alpha=6.0), r"lora.targets was \['q', 'v', 'o', 'down'\] and is \['q', 'k', 'v', 'o'\]"),
        (None, "lora was {.*} and is None"),
    ):
        with pytest.raises(ValueError, match=rf"holds a run with another \[lora\].*{words}"):
            check(replace(resumed, lora=other), framework)
    check(resumed, framework)
    work(framework, gloo, resumed)
    np.testing.assert_array_equal(numbers(resumed)["losses"], numbers(whole)["losses"])
    for found, wanted in ((adapters(resumed), adapters(whole)), (weights(resumed), weights(whole))):
        for name, x in wanted.items():
            np.testing.assert_array_equal(found[name], x, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("framework", first(["torch", "jax"]))
def test_adapters_of_bfloat16_weights_are_float32_and_every_projection_may_have_one(framework: str, base: Path, gloo, tmp_path):
    config = replace(config_of(base, tmp_path / "run", ranks=1), model={"param_dtype": "bfloat16"}, steps=1)
    config = replace(config, lora=LoRA(rank=1, targets=("q", "k", "v", "o", "gate", "up", "down")), seed=-3)
    work(framework, gloo, config)
    assert {x.dtype for x in adapters(config).values()} == {np.dtype("float32")} and len(adapters(config)) == 28
    assert np.isfinite(numbers(config)["losses"]).all()
    merged = load_weights(Path(config.out, "weights"))
    assert {x.dtype for x in merged.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rank": "8"}, r"lora.rank must be an int of at least 1, got '8'"),
        ({"rank": 1.5}, r"lora.rank must be an int of at least 1, got 1.5"),
        ({"alpha": "8"}, r"lora.alpha must be one number, got '8'"),
        ({"targets": 5}, r"lora.targets must be a list of q, k, v, o, gate, up, down, got 5"),
        ({"targets": "qv"}, r"lora.targets must be a list of q, k, v, o, gate, up, down, got 'qv'"),
    ],
    ids=str,
)
def test_arguments_of_another_type_are_refused_in_words(given: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        LoRA(**given)


def test_a_damaged_checkpoint_is_not_taken_for_one_of_other_adapters(base: Path, tmp_path: Path):
    """``resume`` names the damaged file."""
    run_file = tmp_path / "checkpoints" / "step-000000003" / "run.json"
    run_file.parent.mkdir(parents=True)
    run_file.write_text("{")
    check(config_of(base, tmp_path), "torch")
    run_file.write_text("{}")
    with pytest.raises(ValueError, match=r"holds a run with another \[lora\]"):
        check(config_of(base, tmp_path), "torch")


def test_the_last_line_names_the_adapters(base: Path, tmp_path: Path, capsys):
    for config, named in ((config_of(base, tmp_path), True), (replace(config_of(base, tmp_path), lora=None), False)):
        run._finish(config)
        words = capsys.readouterr().out.replace("\n", "")
        assert str(tmp_path / "weights") in words and (str(tmp_path / "adapters") in words) == named


def test_the_last_line_names_a_picture_if_matplotlib_is_there(base: Path, tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(run, "find_spec", lambda _: None)
    run._finish(config_of(base, tmp_path))
    assert "train.png" not in capsys.readouterr().out


def test_adapters_begin_as_in_peft_and_differ_by_name_and_seed():
    config = RingTransformer(**MODEL).config
    drawn, again, other = (first_adapters(ADAPTERS, config, seed) for seed in (3, 3, 4))
    for name, (a, b) in drawn.items():
        inputs, outputs = widths(config)[name.rpartition(".")[2]]
        assert a.shape == (3, inputs) and b.shape == (outputs, 3)
        assert not b.any() and 0.5 * inputs**-0.5 < np.abs(a).max() <= inputs**-0.5
        np.testing.assert_array_equal(a, again[name][0])
        assert (a != other[name][0]).any()
    assert (drawn["blocks.0.attention.q"][0] != drawn["blocks.1.attention.q"][0]).any()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rank = 0", "lora.rank must be an int of at least 1, got 0"),
        ("rank = 2.5", "lora.rank must be an integer, got 2.5"),
        ("rank = 9", "lora.rank = 9 is above the width of k, which maps 16 features to 8: make it at most 8, or leave 'k' out"),
        ("alpha = 0", "lora.alpha must be more than 0 and finite, got 0.0"),
        ("alpha = nan", "lora.alpha must be more than 0 and finite, got nan"),
        ("targets = []", "lora.targets names the projections with adapters, and there is none: choose from q, k, v, o, gate"),
        ("targets = ['out']", "lora.targets names the projections with adapters, and 'out' is not one of them: choose from q,"),
        ("targets = 'q'", "lora.targets must be a list of texts, got 'q'"),
        ("ranks = 3", "[lora] has no key 'ranks': did you mean 'rank'? it has rank, alpha, targets"),
        (None, "[lora] freezes the weights of init_from, and init_from is missing"),
    ],
)
def test_a_mistake_is_refused_before_anything_starts(text: str | None, words: str, base: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    begin = "" if text is None else f"init_from = {json.dumps(str(base / 'model'))}\n"
    data = f"[data]\nfolder = {json.dumps(str(base / 'data'))}\npattern = '**/*.txt'\nheld_out = '**/*.txt'\nlength = 48\n"
    Path("config.toml").write_text(f"{begin}[lora]\n{text or ''}\n{data}[ring]\nranks = 2\n[passkey]\nlengths = []\n")
    done = CliRunner().invoke(app, ["train", "config.toml"])
    assert done.exit_code == 2, done.output
    assert words in " ".join(done.output.split()), done.output
