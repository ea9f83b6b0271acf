"""Hybrid models of transformers train over a ring under FSDP2, with LoRA and by RingTrainer as on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("transformers", minversion="5.20", reason="RingTrainer needs it")
pytest.importorskip("accelerate")

import torch

import ring_attn_torch.transformers as hf
from ring_attn_core.reference.tolerance import relative_error
from ring_attn_torch import sum_gradients

from . import hugging_face_training
from .hugging_face import in_float64
from .hugging_face_training import Result, Run, trained
from .models import shard_fully
from .test_transformers_hybrids import GRADIENT, Case, batch, compare, make
from .test_transformers_parallel import lora_gradients
from .test_transformers_training import near

pytestmark = pytest.mark.slow


def test_fsdp2_gets_the_gradients_of_each_document_alone(four: Any):
    for got in four(4, under_fsdp):
        compare(got, Case("qwen3_5", "packed"))


def under_fsdp(group: Any) -> dict[str, np.ndarray]:
    torch.set_grad_enabled(True)
    model = make("qwen3_5")
    model.gradient_checkpointing_enable()
    shard_fully(group, *model.model.layers, model)
    with in_float64(), hf.sequence_parallel(model, group):
        loss = model(**batch("packed")).loss
        loss.backward()
    sum_gradients(model, group)
    return {"loss": loss.detach().numpy()} | {name: p.grad.full_tensor().numpy() for name, p in model.named_parameters()}


@pytest.mark.exhaustive
def test_lora_of_linear_layers_gets_the_gradients_of_one_process(four: Any):
    pytest.importorskip("peft")
    want = adapted(None)
    assert any("mamba" in name for name in want)
    for got in four(4, adapted):
        assert got.keys() == want.keys()
        assert max(relative_error(got[name], want[name]) for name in want) < GRADIENT


def adapted(group: Any) -> dict[str, np.ndarray]:
    torch.set_grad_enabled(True)
    return lora_gradients(group, make("bamba"), batch("plain"), ["in_proj", "q_proj"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("steps", [4, pytest.param(50, marks=pytest.mark.full)])
def test_ring_trainer_trains_on_packed_documents_as_on_one_rank(four: Any, tmp_path: Path, steps: int):
    one = hybrid_trained(None, steps, str(tmp_path / "one"))
    for got in four(4, hybrid_trained, steps, str(tmp_path / "four")):
        near(got, one)


def hybrid_trained(group: Any, steps: int, folder: str) -> Result:
    """Train in float64: of one document in float32 a decay's gradient has three digits."""
    with in_float64(), patch.object(hugging_face_training, "make", lambda name, *_: make(name)):
        return trained(Run(steps, folder, model="qwen3_5"), group, hf.RingTrainer)


def test_checkpoints_whose_weights_have_other_names_resume_and_give_the_best_model(tmp_path: Path):
    """transformers saves Nemotron-H under the Hub's names, and its own Trainer then loads no weight of such a checkpoint."""
    saving = (("save_strategy", "steps"), ("save_steps", 1))
    best = (("eval_strategy", "steps"), ("eval_steps", 1), ("load_best_model_at_end", True), ("greater_is_better", True))
    first, folder = str(tmp_path / "first"), str(tmp_path / "killed")
    with in_float64(), patch.object(hugging_face_training, "make", lambda name, *_: make(name)):
        runs = [
            Run(1, first),
            Run(2, first),
            Run(2, folder, settings=saving, killed_after=1),
            Run(2, folder, settings=saving, resumed=True),
            Run(2, str(tmp_path / "best"), settings=saving + best),  # by the highest loss: that of the first step
        ]
        one, two, _, resumed, chosen = (trained(run._replace(model="nemotron_h"), None, hf.RingTrainer) for run in runs)
    near(resumed, two)
    near(chosen._replace(logs=one.logs, gradients=one.gradients), one)
