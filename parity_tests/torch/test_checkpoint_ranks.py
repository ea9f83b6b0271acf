"""Ranks that save something else than the others, a checkpoint or weights: all raise the same, and none waits."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ring_attn_torch import Checkpoints, RingTransformer, save_llama, save_weights

from ..support.models import TRANSFORMER

pytest.importorskip("safetensors")


AT_ONCE = 90
"""Seconds, half of the pool's timeout, after which no rank waits any more."""


def began(group: Any) -> float:
    """When all ranks were ready to save."""
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp

    torch.distributed.barrier(group)
    return time.monotonic()


def saving_on_rank(group: Any, folder: Path, case: str) -> str:
    """Return the error of a save if rank 1 differs from the others as ``case`` says."""
    other = torch.distributed.get_rank(group) == 1
    torch.manual_seed(0)
    model: Any = torch.nn.Linear(3, 4 if other and case == "shape" else 2, bias=not (other and case == "name"))
    model = model.to(torch.bfloat16 if other and case == "dtype" else torch.float32)
    optimizer: Any = None if other and case == "optimizer" else torch.optim.AdamW(model.parameters())
    if other and case == "setting":
        optimizer.param_groups[0]["name"] = torch
    more = {"x": torch} if other and case == "more" else {}
    checkpoints, start = Checkpoints(folder, group=group), began(group)
    with pytest.raises(ValueError, match=re.escape(OBJECTIONS[case])) as raised:
        checkpoints.save(2 if other and case == "step" else 1, model, optimizer, more=more)
    assert time.monotonic() - start < AT_ONCE
    return str(raised.value)


OBJECTIONS = {
    "step": "step is 1 on rank 0, 2 on rank 1, 1 on rank 2: all ranks must make the same calls",
    "optimizer": "optimizer is 'AdamW' on rank 0, None on rank 1, 'AdamW' on rank 2: all ranks must make the same calls",
    "setting": "rank 1: name of group 0 of the optimizer is module, which a checkpoint cannot carry",
    "more": "rank 1: more must be a dict that JSON can hold",
    "shape": "2 of 2 entries are not the same everywhere: model.weight is Tensor float32 [2, 3] on ranks 0, 2, Tensor float32 [4",
    "dtype": "2 of 2 entries are not the same everywhere: model.weight is Tensor float32 [2, 3] on ranks 0, 2, Tensor bf",
    "name": "1 of 2 entries are not the same everywhere: model.bias is Tensor float32 [2] on ranks 0, 2, absent on rank 1",
}


@pytest.mark.parametrize("case", OBJECTIONS)
def test_ranks_that_save_other_checkpoints_all_say_so_before_anything_is_written(case: str, gloo, tmp_path):
    said = gloo(3, saving_on_rank, tmp_path / "run", case)
    assert len(set(said)) == 1
    assert said[0].startswith(OBJECTIONS[case])
    assert not (tmp_path / "run").exists()


def resuming_on_rank(group: Any, folder: Path) -> str:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = Checkpoints(folder, group=group)
    checkpoints.save(1, model, optimizer)
    checkpoints.close()
    with pytest.raises(ValueError, match="optimizer is") as raised:
        checkpoints.resume(model, None if torch.distributed.get_rank(group) else optimizer)
    return str(raised.value)


def test_an_optimizer_that_one_rank_leaves_out_of_resume_is_refused_on_all(gloo, tmp_path):
    for said in gloo(2, resuming_on_rank, tmp_path):
        assert said == "optimizer is 'AdamW' on rank 0, None on rank 1: all ranks must make the same calls"


def weights_on_rank(group: Any, folder: Path, case: str) -> str:
    """Return the error of saving weights if rank 1 differs from the others as ``case`` says."""
    other, save = torch.distributed.get_rank(group) == 1, save_weights
    sizes: dict[str, Any] = {"vocab": 37} if other and case == "shape" else {}
    model: Any = RingTransformer(**TRANSFORMER | sizes, group=group)
    if other and case == "dtype":
        model.norm.to(torch.bfloat16)
    if other and case == "module":
        model = torch.nn.Linear(3, 2)
    if other and case == "int":
        model.norm.weight = torch.nn.Parameter(model.norm.weight.int(), requires_grad=False)
    if case == "llama":
        save, model = save_llama, RingTransformer(**TRANSFORMER, softcap=3.0 if other else None, group=group)
    start = began(group)
    with pytest.raises((ValueError, OSError)) as raised:
        save(model, folder, group=group)
    assert time.monotonic() - start < AT_ONCE
    return f"{type(raised.value).__name__} {raised.value}"


WEIGHTS = {
    "module": "ValueError rank 1: weights are saved of a RingTransformer, or of what wraps one, got Linear",
    "int": "ValueError rank 1: norm.weight is int32, and weights are saved in",
    "shape": "ValueError 1 of 20 entries are not the same everywhere: embed.weight is Tensor float32 [31,",
    "dtype": "ValueError 1 of 20 entries are not the same everywhere: norm.weight is Tensor float32 [24] on rank 0, Tensor bf",
    "llama": "ValueError rank 1: ",
    "folder": "OSError rank 0: ",
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_all_ranks_refuse_at_once_weights_that_one_cannot_save(case: str, gloo, tmp_path):
    folder = tmp_path / "weights"
    if case == "folder":
        (tmp_path / "file").write_text("")
        folder = tmp_path / "file" / "weights"
    said = gloo(2, weights_on_rank, folder, case)
    assert len(set(said)) == 1
    assert said[0].startswith(WEIGHTS[case]), said[0]
    assert not folder.exists()
