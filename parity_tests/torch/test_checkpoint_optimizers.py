"""Tests of a checkpoint's record of dtypes, the optimizer's class, its groups of parameters and their settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ring_attn_torch import Checkpoints

from .test_checkpoint_refusals import everything, same

pytest.importorskip("safetensors")


def made(kind: str = "AdamW", dtype: str = "float32", seed: int = 0, swapped: bool = False, **settings: Any) -> tuple[Any, Any]:
    """A model and an optimizer with a group for its weight and one for its bias."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 3).to(getattr(torch, dtype))
    groups = [{"params": [p]} for p in model.parameters()]
    return model, getattr(torch.optim, kind)(groups[::-1] if swapped else groups, **{"lr": 0.1} | settings)


def step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3, dtype=model.weight.dtype)).square().mean().backward()
    optimizer.step()


def saved(folder: Path, **how: Any) -> tuple[Any, Any]:
    model, optimizer = made(**how)
    step(model, optimizer)
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, model, optimizer)
    checkpoints.close()
    return model, optimizer


OTHERS = {
    "dtype": ({}, {"dtype": "bfloat16"}, r"model\.weight is float32 and must be bfloat16; model\.bias is float32 and must be"),
    "Adam": ({}, {"kind": "Adam"}, r"the optimizer of .*run\.json is 'AdamW', and this one 'Adam': make it as it was"),
    "SGD": ({"kind": "SGD", "momentum": 0.9}, {}, r"the optimizer of .*run\.json is 'SGD', and this one 'AdamW'"),
    "amsgrad": ({}, {"amsgrad": True}, "max_exp_avg_sq is missing"),
    "groups": ({}, {"swapped": True}, r"group 0 of the optimizer of .*run\.json has weight, and that of this one has not"),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("stepped", [False, True])
def test_another_dtype_class_or_grouping_is_refused_and_changes_no_bit(name: str, stepped: bool, tmp_path):
    of_run, other, message = OTHERS[name]
    saved(tmp_path, **of_run)
    model, optimizer = made(seed=5, **other)
    if stepped:
        step(model, optimizer)
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match=message):
        Checkpoints(tmp_path).resume(model, optimizer)
    assert same(everything(model, optimizer), before)


def test_a_state_of_another_dtype_is_refused(tmp_path):
    saved(tmp_path)
    model, optimizer = made(seed=5)
    step(model, optimizer)
    for x in optimizer.state[model.bias].values():
        x.data = x.to(torch.float64)
    with pytest.raises(ValueError, match=r"optimizer\.state\.bias\.step is float32 and must be float64"):
        Checkpoints(tmp_path).resume(model, optimizer)


def test_an_optimizer_of_an_earlier_version_is_resumed(tmp_path):
    model, _ = saved(tmp_path)
    file = tmp_path / "step-000000001" / "run.json"
    run = json.loads(file.read_text())
    del run["optimizer_class"]
    file.write_text(json.dumps(run | {"optimizer": [group | {"params": 1} for group in run["optimizer"]]}))
    other = made(seed=5)
    assert Checkpoints(tmp_path).resume(*other) is not None
    assert torch.equal(other[0].weight, model.weight)


@pytest.mark.parametrize("value", [np.float32(0.1), torch.tensor([0.1, 0.2]), {1: 0.1}], ids=["numpy", "tensor", "dict"])
def test_a_setting_that_json_cannot_carry_is_named_before_anything_is_written(value: Any, tmp_path):
    model, optimizer = made()
    optimizer.param_groups[1]["weight_decay"] = value
    with pytest.raises(ValueError, match=r"weight_decay of group 1 of the optimizer is .*: make it a Python number"):
        Checkpoints(tmp_path / "run").save(1, model, optimizer)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("lr", [np.float64(1 / 3), torch.tensor(1 / 3), torch.tensor(1 / 3, dtype=torch.float64)])
def test_a_rate_of_numpy_or_a_tensor_comes_back_exactly(lr: Any, tmp_path):
    settings: dict[str, Any] = (
        {"lr": lr, "betas": (torch.tensor(0.1), torch.tensor(0.2))} if isinstance(lr, torch.Tensor) else {"lr": lr}
    )
    whole = saved(tmp_path, **settings, foreach=False, capturable=False)
    fresh: dict[str, Any] = {name: tuple(map(torch.zeros_like, x)) if name == "betas" else x * 0 for name, x in settings.items()}
    resumed = made(seed=5, **fresh, foreach=False)
    Checkpoints(tmp_path).resume(*resumed)
    for ours, theirs in zip(resumed[1].param_groups, whole[1].param_groups, strict=True):
        assert ours["lr"] == theirs["lr"]
        assert ours["betas"] == theirs["betas"]
    for each in (whole, resumed):
        step(*each)
    assert torch.equal(whole[0].weight, resumed[0].weight)


class Sharpness(torch.optim.Optimizer):
    """An optimizer that steps by another one, as SAM does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)

    def step(self) -> None:  # type: ignore[override]
        self.base.step()


class Lookahead(torch.optim.Optimizer):
    """A wrapper of an optimizer, with a state of its own."""

    def __init__(self, parameters: Any) -> None:
        self.optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        super().__init__(self.optimizer.param_groups, {})

    def step(self) -> None:  # type: ignore[override]
        self.optimizer.step()
        self.state.update({p: {"slow": p.detach().clone()} for group in self.param_groups for p in group["params"]})


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Sharpness, "Sharpness keeps states in several optimizers, and a checkpoint has those of one: SGD would lose its own"),
        (Lookahead, "Lookahead keeps states in several optimizers, and a checkpoint has those of one: Lookahead would lose"),
        (lambda parameters: [torch.optim.SGD(parameters)], "optimizer must be one torch.optim.Optimizer, got list: save each"),
    ],
    ids=["inside", "outside", "list"],
)
def test_states_that_a_checkpoint_would_lose_are_refused_before_anything_is_written(kind: Any, words: str, tmp_path):
    model, _ = made()
    optimizer: Any = kind(model.parameters())
    if hasattr(optimizer, "step"):
        step(model, optimizer)
    with pytest.raises(ValueError, match=words):
        Checkpoints(tmp_path / "run").save(1, model, optimizer)
    assert not (tmp_path / "run").exists()


def test_the_state_that_an_optimizer_keeps_as_a_number_is_named(tmp_path):
    model = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"optimizer\.state\.weight\.step is 1, and only tensors are saved: .*SparseAdam"):
        Checkpoints(tmp_path / "run").save(1, model, optimizer)
    assert not (tmp_path / "run").exists()
