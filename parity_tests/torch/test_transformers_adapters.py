"""Adapters of PEFT that are trained on a ring, saved, and loaded into a plain model."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ring_attn_torch.transformers as hf

from ..support.models import apart
from .hugging_face import Case, batch, in_float64, make
from .hugging_face_generation import generated, prompts
from .hugging_face_training import Run, all_trained, trained
from .models import shard_fully
from .test_transformers_training import near

pytest.importorskip("peft")


pytestmark = pytest.mark.slow


def test_an_adapter_trained_under_fsdp2_is_saved_and_generates_in_a_plain_model(four: Any, tmp_path: Path):
    from peft import PeftModel  # type: ignore[import-not-found]

    weights, ids = tuned(None, "unused")
    (whole, _), *_ = found = four(4, tuned, str(tmp_path))  # the weights are gathered on rank 0 alone
    assert apart(whole, weights) < 1e-11
    assert all(np.abs(x).max() > 0 for x in whole.values())  # B begins at 0
    model: Any = PeftModel.from_pretrained(make("llama"), tmp_path, autocast_adapter_dtype=False).eval()
    saved = {name: p.detach().numpy() for name, p in model.named_parameters() if "lora" in name}
    assert {name for name, x in whole.items() if not np.array_equal(saved[name], x)} == set()
    for text in (*(each[1] for each in found), generated(model, prompts(), max_new_tokens=4).ids):
        np.testing.assert_array_equal(text, ids)


def tuned(group: Any, folder: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Train an adapter, on a ring under FSDP2 unless ``group`` is None, and save it. Return its weights, and generated text."""
    from peft import LoraConfig, get_peft_model
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import register_fsdp_forward_method

    torch.set_grad_enabled(True)
    torch.manual_seed(1)
    model: Any = get_peft_model(make("llama"), LoraConfig(r=2, target_modules="all-linear"), autocast_adapter_dtype=False)
    model, ranks = model.double(), 1 if group is None else group.size()
    if group is not None:
        shard_fully(group, *model.base_model.model.model.layers, model)
        register_fsdp_forward_method(model, "generate")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    with nullcontext() if group is None else hf.sequence_parallel(model, group):
        for _ in range(2):  # LoRA's A gets no gradient in the first step
            with in_float64():
                (model(**batch(Case("llama", "padded"))).loss * ranks).backward()
            optimizer.step()
            optimizer.zero_grad()
        ids = generated(model.eval(), prompts(), max_new_tokens=4).ids
    whole: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if group is not None and group.rank() == 0:
        model.save_pretrained(folder, state_dict=whole)
    return {name: x.numpy() for name, x in whole.items() if "lora" in name}, ids


@pytest.mark.exhaustive
def test_a_model_trained_with_lora_is_saved_and_comes_back(four: Any, tmp_path: Path):
    one = trained(Run(4, str(tmp_path / "one"), lora=True))
    saving = (("save_strategy", "steps"), ("save_steps", 4))
    for (got,) in four(4, all_trained, [Run(4, str(tmp_path / "four"), lora=True, settings=saving)]):
        near(got, one)
    back = saved_adapter(str(tmp_path / "four" / "checkpoint-4"))
    assert {name: x for name, x in got.weights.items() if not np.array_equal(back[name], x)} == {}


def saved_adapter(folder: str) -> dict[str, np.ndarray]:
    from peft import PeftModel  # type: ignore[import-not-found]

    model: Any = PeftModel.from_pretrained(make("llama", "float32"), folder, is_trainable=True)
    assert model.get_base_model().config._attn_implementation == "eager"
    return {name: p.detach().numpy() for name, p in model.named_parameters() if p.requires_grad}
