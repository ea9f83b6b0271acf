"""Untried releases of transformers run with one warning; what needs a newer one says so before anything is computed."""

from __future__ import annotations

import importlib.util
import re
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import ring_attn_torch.transformers as hf
from ring_attn_core import releases

from ..support import warm
from ..support.programs import environment
from .hugging_face import make

ROOT = Path(__file__).parents[2]


def test_an_untried_transformers_is_named_once_and_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(releases, "version", lambda package: {"transformers": "5.99.0"}.get(package, "2.15.0"))
    monkeypatch.setattr(releases, "_looked_at", {"torch"})
    model, ids = make("llama", "float32"), torch.ones(1, 8, dtype=torch.long)
    with pytest.warns(UserWarning, match=re.escape("transformers 5.99.0 was not tried with ring-attn")):
        hf.enable(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with hf.sequence_parallel(model):
            assert model(input_ids=ids, labels=ids).loss > 0


def test_an_untried_torch_is_named_once_and_runs(monkeypatch: pytest.MonkeyPatch):
    from ring_attn_torch import ring_attention
    from ring_attn_torch.call import decide
    from ring_attn_torch.ring import agreement

    monkeypatch.setattr(releases, "version", lambda package: "9.9")
    monkeypatch.setattr(releases, "_looked_at", set())
    decide.compile_call.cache_clear()
    agreement.ALONE.agreed.clear()
    x = torch.ones(1, 6, 1, 8)
    with pytest.warns(UserWarning, match=re.escape("torch 9.9 was not tried with ring-attn")):
        ring_attention(x, x, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ring_attention(x[:, :4], x[:, :4], x[:, :4])


def test_the_extra_of_trl_brings_a_transformers_that_its_trainers_take():
    pytest.importorskip("accelerate")
    from ring_attn_torch.transformers.arguments import OLDEST

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert f"transformers>={OLDEST}" in extras["trl"]


def test_the_example_says_which_transformers_it_needs(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("accelerate")
    spec = importlib.util.spec_from_file_location("hf_finetune", ROOT / "examples" / "hf_finetune.py")
    assert spec is not None and spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(example.transformers, "__version__", "5.17.0")
    with pytest.raises(SystemExit, match=r"needs transformers 5\.23 or newer, .* and this is 5\.17\.0: pip install"):
        example.main()


TRAINER = """
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed
from ring_attn_torch.transformers import RingTrainer

set_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2))
rows = [{"input_ids": list(range(i, i + 75)), "labels": list(range(i, i + 75))} for i in range(1, 5)]
arguments = TrainingArguments("trained", max_steps=2, learning_rate=1e-2, use_cpu=True, report_to=[], save_strategy="no")
RingTrainer(model=model, args=arguments, train_dataset=rows).train()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_trainer_prints_no_warning_of_unused_parameters(tmp_path: Path):
    pytest.importorskip("accelerate")
    (tmp_path / "program.py").write_text(TRAINER)
    said = warm.run(["program.py"], "parity_tests.torch.hugging_face", tmp_path, environment(), processes=2, errors=True)
    assert "train_loss" in said
    assert "unused" not in said
    assert "was not tried" not in said
