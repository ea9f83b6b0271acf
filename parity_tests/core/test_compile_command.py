"""``ring-attn compile``: the kernels of a model's calls, compiled before there is a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import triton
from typer.testing import CliRunner

from ring_attn_cli.compile import ModelAttention, attention_of, kernels_of, problems, with_features
from ring_attn_cli.main import app
from ring_attn_core.kernels import backends, steps
from ring_attn_core.kernels.call import call_of
from ring_attn_core.kernels.compile import is_cached
from ring_attn_core.problem.options import Options
from ring_attn_core.problem.problem import Problem

GPT_OSS = {"model_type": "gpt_oss", "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64}
GEMMA = {"text_config": {"model_type": "gemma2", "hidden_size": 64, "num_attention_heads": 4, "attn_logit_softcapping": 50.0}}


def run(*arguments: str):
    return CliRunner().invoke(app, ["compile", *arguments])


@pytest.fixture(autouse=True)
def tried(monkeypatch):
    monkeypatch.setattr(backends, "triton_release", lambda: (3, 6))


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_compiled_kernels_serve_calls_of_any_length_batch_and_heads(layout, ranks):
    compiled = {launch.specialization(90) for launch in kernels_of(problems(ModelAttention(), "sm_90", ranks, layout, "ring"))}
    for batch, local, heads, short in ((1, 130, 4, 0), (3, 4096, 64, 1), (2, 20_000, 32, 0), (1, 3000, 12, 1)):
        q, k = (batch, local, heads, 128), (batch, local, heads // 4, 128)
        options = Options(layout=layout, length=ranks * local - short * (ranks > 1), strategy="ring")
        problem = Problem(q, k, k, ("bfloat16", "bfloat16", "bfloat16"), "cuda", ranks, options, capability=90)
        call = call_of(problem, "hopper")
        needed = {x.specialization(90) for make in (steps.of_forward, steps.of_backward) for x in make(call, ranks)}
        assert needed <= compiled


def test_a_model_is_read_from_its_config(tmp_path: Path):
    found = []
    for config in (GPT_OSS, GEMMA | {"model_type": "gemma2"}):
        (tmp_path / "config.json").write_text(json.dumps(config))
        found.append(attention_of(str(tmp_path / "config.json")))
    assert found[0] == ModelAttention(64, 8, 64, 64, arrays=frozenset({"sinks"}))
    assert found[1] == ModelAttention(4, 4, 16, 16, softcap=50.0)
    assert attention_of("qwen3-8b") == ModelAttention()
    (tmp_path / "run.toml").write_text('[model]\ndim = 64\nheads = 4\nkv_heads = 2\nsinks = true\nparam_dtype = "bfloat16"\n')
    assert attention_of(str(tmp_path / "run.toml")) == ModelAttention(4, 2, 16, 16, arrays=frozenset({"sinks"}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h100"], "--gpu takes an architecture such as sm_90 (H100, H200), got 'h100'"),
        (["--heads", "many"], "--heads takes numbers of query and key heads such as 32/8, got 'many'"),
        (["--features", "window"], "--features takes extents, key_extents, key_mask, sinks, alibi_slopes, dropout and softcap"),
        (["--dtype", "float64"], "these calls run blockwise, without kernels: there is nothing to compile"),
    ],
)
def test_a_mistake_is_one_sentence(arguments, message):
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())


def test_check_compiles_nothing_and_tells_by_its_status(monkeypatch, tmp_path):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))  # type: ignore
    monkeypatch.setattr("ring_attn_core.kernels.compile._made", {})
    done = run("--check", "--ranks", "2", "--features", "extents,softcap")
    assert (done.exit_code, done.output.split(" kernels")[0].split()[0]) == (1, "0")
    assert not list(tmp_path.glob("*/*.cubin"))


@pytest.mark.exhaustive
def test_the_kernels_are_in_the_cache_afterwards(monkeypatch, tmp_path):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))  # type: ignore
    monkeypatch.setattr("ring_attn_core.kernels.compile._made", {})
    arguments = ["--gpu", "sm_80", "--head-dim", "64", "--json", str(tmp_path / "report.json")]
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["kernels"] == 4 and report["cached"] == 0 and report["bytes"] > 10_000
    monkeypatch.setattr("ring_attn_core.kernels.compile._made", {})
    assert run(*arguments[:4], "--check").exit_code == 0
    attention = with_features(ModelAttention(head_dim=64, v_dim=64), "")
    assert all(is_cached(launch, 80) for launch in kernels_of(problems(attention, "sm_80", 1, "zigzag", "auto")))
