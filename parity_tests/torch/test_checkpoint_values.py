"""Tests of the values of a checkpoint in PyTorch: tensors of any kind that its files can hold, each under its own name."""

from __future__ import annotations

import re
from shutil import rmtree
from typing import Any

import pytest
import torch
from torch import nn

from ring_attn_torch import Checkpoints, to_numpy

pytest.importorskip("safetensors")


def alike(inner: str) -> nn.Module:
    """Two linear maps whose parameters are called ``a.b.weight`` and ``a.b.bias``."""
    model = nn.Module()
    model.a = nn.Module()
    model.a.b = nn.Linear(2, 2)
    if inner == "a.b":
        model._modules["a.b"] = nn.Linear(2, 2)
    else:
        model.a._modules[inner] = nn.Module()
        model.a._modules[inner].b = nn.Linear(2, 2)  # pyright: ignore[reportOptionalMemberAccess]
    return model


@pytest.mark.parametrize("inner", ["a.b", "_orig_mod"])
def test_two_names_that_join_alike_are_refused(inner: str, tmp_path):
    model = alike(inner)
    for call in (lambda: Checkpoints(tmp_path / "run").save(1, model), lambda: to_numpy(model)):
        with pytest.raises(ValueError, match=r"two entries are called 'a\.b\.weight': rename one"):
            call()
    assert not (tmp_path / "run").exists()


def test_buffers_that_join_alike_are_refused(tmp_path):
    model = nn.Linear(2, 2)
    model._modules["_orig_mod"] = nn.Module()
    model._modules["_orig_mod"].register_buffer("weight", torch.zeros(2))
    with pytest.raises(ValueError, match="two entries are called 'weight'"):
        Checkpoints(tmp_path / "run").save(1, model)


REFUSED = {
    "complex128": (lambda: torch.ones(2, dtype=torch.complex128), r"model\.x is torch\.complex128"),
    "sparse": (lambda: torch.eye(2).to_sparse(), r"model\.x is torch\.float32, torch\.sparse_coo"),
    "meta": (lambda: torch.ones(2, device="meta"), r"model\.x is torch\.float32, torch\.strided, on meta"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_tensor_that_no_file_can_hold_is_named_before_anything_is_written(name: str, tmp_path):
    make, message = REFUSED[name]
    model = nn.Module()
    model.x = nn.Parameter(make())
    with pytest.raises(ValueError, match=message + ".*: a checkpoint holds dense tensors with values"):
        Checkpoints(tmp_path / "run").save(1, model)
    assert not (tmp_path / "run").exists()


TENSORS: dict[str, Any] = {
    "empty": lambda: torch.zeros(0, 3),
    "scalar": lambda: torch.tensor(3.0),
    "strided": lambda: torch.arange(6.0)[::2],
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "complex64": lambda: torch.ones(3, dtype=torch.complex64),
    "uint16": lambda: torch.ones(3, dtype=torch.uint16),
    "float64": lambda: torch.tensor([1 / 3], dtype=torch.float64),
    "int64": lambda: torch.tensor([2**53 + 1]),
}


def test_tensors_of_any_dtype_shape_and_stride_come_back(tmp_path):
    one, other = nn.Module(), nn.Module()
    for name, make in TENSORS.items():
        one.register_buffer(name, make())
        other.register_buffer(name, torch.zeros_like(make()))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, one)
    checkpoints.resume(other)
    checkpoints.close()
    for name, make in TENSORS.items():
        expected = make()
        bits = lambda x: x.contiguous().view(torch.uint8) if x.ndim else x
        assert torch.equal(bits(getattr(other, name)), bits(expected)), name


class Copies(nn.Linear):
    """A layer whose ``state_dict`` holds a copy of its weight, and a count as a new tensor."""

    def __init__(self, count: int) -> None:
        super().__init__(2, 2)
        self.count = count
        self.register_state_dict_post_hook(lambda _, state, prefix, __: state.update({f"{prefix}weight": self.weight.clone()}))

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor([self.count])

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.count = int(state)


def test_values_that_a_state_dict_copies_come_back(tmp_path):
    (one, other), checkpoints = (nn.Sequential(Copies(count)) for count in (3, 0)), Checkpoints(tmp_path)
    checkpoints.save(1, one)
    checkpoints.resume(other)
    checkpoints.close()
    assert other[0].count == 3
    assert torch.equal(other[0].weight, one[0].weight)  # type: ignore[arg-type]


def test_a_model_that_is_not_a_module_is_refused(tmp_path):
    model: Any = nn.Linear(2, 2).state_dict()
    with pytest.raises(
        ValueError, match=r"model must be a torch\.nn\.Module, got OrderedDict: several fit into an nn\.ModuleDict"
    ):
        Checkpoints(tmp_path).save(1, model)


def sharded_by_fsdp1(group: Any, folder: Any) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(nn.Linear(2, 2), process_group=group, device_id=torch.device("cpu"), use_orig_params=True)
    Checkpoints(folder, group=group).save(1, model)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_shards_of_fsdp1_are_refused_by_name(gloo, tmp_path):
    for error in gloo.outcomes(2, sharded_by_fsdp1, tmp_path):
        assert re.search(
            r"rank 0: model\.weight, model\.bias: sharded by FSDP of version 1: shard the model by fully", str(error)
        )


def tied(seed: int) -> tuple[Any, Any]:
    """Return a model whose two layers share a weight, and an optimizer of two groups after a step."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "norm": nn.LayerNorm(3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight  # type: ignore[assignment]
    groups = [{"params": model["embed"].parameters(), "lr": seed + 0.1}, {"params": model["norm"].parameters(), "lr": seed + 0.2}]
    optimizer = torch.optim.AdamW(groups)
    model["head"](model["norm"](model["embed"](torch.arange(5)))).square().sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_weight_of_two_names_and_each_group_come_back(tmp_path):
    (model, optimizer), (other, fresh), checkpoints = tied(0), tied(1), Checkpoints(tmp_path)
    checkpoints.save(1, model, optimizer)
    checkpoints.resume(other, fresh)
    checkpoints.close()
    assert other["head"].weight is other["embed"].weight
    for mine, theirs in (
        (other.state_dict(), model.state_dict()),
        (fresh.state_dict()["state"], optimizer.state_dict()["state"]),
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.2]


def test_a_checkpoint_that_was_written_anew_is_read_anew(tmp_path):
    model, checkpoints = nn.Linear(1, 1, bias=False), Checkpoints(tmp_path)
    for value in (2.0, 3.0):
        nn.init.constant_(model.weight, value)
        checkpoints.save(1, model, data=str(value))
        checkpoints.wait()
        nn.init.zeros_(model.weight)
        assert checkpoints.resume(model) == (1, str(value), {})
        assert model.weight.item() == value
        rmtree(tmp_path / "step-000000001")
    checkpoints.close()
