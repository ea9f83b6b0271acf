"""Checkpoints of models with parameters that had no gradient yet, such as experts that no token reached."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ring_attn_torch import Checkpoints

pytest.importorskip("safetensors")


class Experts(torch.nn.Module):
    """A mixture of linear experts, of which each batch reaches one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.router = torch.nn.Linear(4, 3)

    def forward(self, x: Any, chosen: int) -> Any:
        return self.experts[chosen](x) * self.router(x).softmax(-1)[..., chosen, None]


def made(seed: int = 0) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = Experts()
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)


def step(model: Any, optimizer: Any, chosen: int) -> None:
    optimizer.zero_grad()
    model(torch.randn(2, 4), chosen).square().mean().backward()
    optimizer.step()


def assert_equal(one: tuple[Any, Any], other: tuple[Any, Any]) -> None:
    for (name, x), y in zip(one[0].named_parameters(), other[0].parameters(), strict=True):
        assert torch.equal(x, y), name
    for x, y in zip(one[0].parameters(), other[0].parameters(), strict=True):
        mine, theirs = one[1].state.get(x, {}), other[1].state.get(y, {})
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


KILLED = """
import os, pathlib, signal, sys
from parity_tests.torch.test_checkpoint_experts import Checkpoints, made, step

model, optimizer = made()
checkpoints = Checkpoints(pathlib.Path(sys.argv[1]))
for number in (1, 2):
    step(model, optimizer, 0)
    checkpoints.save(number, model, optimizer)
checkpoints.wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.exhaustive
def test_experts_without_a_gradient_are_saved_killed_and_resumed_to_the_bit(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    whole = made()
    for _ in (1, 2):
        step(*whole, 0)
    after, resumed = torch.get_rng_state(), made(1)
    progress = Checkpoints(tmp_path).resume(*resumed)
    assert progress is not None and progress.step == 2
    assert_equal(resumed, whole)
    for chosen in (1, 0, 2):  # the first step of one expert, the third of another
        for each in (whole, resumed):
            torch.set_rng_state(after)
            step(*each, chosen)
        assert_equal(resumed, whole)


def on_one_rank(group: Any, folder: Path, sharded: bool, kind: str = "AdamW") -> None:
    """Save where the state of a parameter exists on rank 0 only, resume, and compare each rank with what it was."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    def made() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 3))
        if sharded:
            mesh = DeviceMesh.from_group(group, "cpu")
            for layer in model:
                for name, p in [*layer.named_parameters()]:
                    setattr(layer, name, torch.nn.Parameter(distribute_tensor(p.data, mesh, [Shard(0)])))
        return model, getattr(torch.optim, kind)(model.parameters(), lr=0.1 if sharded else 0.0)  # copies stay copies

    model, optimizer = made()
    for number, p in enumerate(model.parameters()):
        if number < 2 or torch.distributed.get_rank(group) == 0:
            p.grad = torch.ones_like(p)
    optimizer.step()
    checkpoints = Checkpoints(folder, group=group)
    checkpoints.save(1, model, optimizer)
    checkpoints.close()
    other = made()
    assert Checkpoints(folder, group=group).resume(*other) is not None
    rank = torch.distributed.get_rank(group)
    states = len(optimizer.state[next(model.parameters())])
    assert [len(other[1].state.get(p, {})) for p in other[0].parameters()] == [states, states, *[0 if rank else states] * 2]
    local = lambda x: x.to_local() if sharded and hasattr(x, "to_local") else x
    for p, q in zip(model.parameters(), other[0].parameters(), strict=True):
        assert torch.equal(local(p), local(q))
        for key, x in optimizer.state.get(p, {}).items():
            assert torch.equal(local(x), local(other[1].state[q][key])), key


@pytest.mark.parametrize("sharded", [False, True])
def test_states_that_exist_on_some_ranks_only_come_back_there_only(sharded: bool, gloo, tmp_path):
    gloo(2, on_one_rank, tmp_path, sharded)


def on_more_ranks(group: Any, folder: Path) -> list[int]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    assert Checkpoints(folder, group=group).resume(model, optimizer) is not None
    return [len(optimizer.state.get(p, {})) for p in model.parameters()]


def test_states_of_one_rank_come_back_on_each_of_another_number_of_ranks(gloo, tmp_path):
    gloo(2, on_one_rank, tmp_path, False)
    assert gloo(3, on_more_ranks, tmp_path) == [[3] * 4] * 3


@pytest.mark.parametrize("kind", ["NAdam", "ASGD"])
def test_states_that_are_one_number_come_back_as_such(kind: str, gloo, tmp_path):
    """NAdam's mu_product, and ASGD's eta and mu."""
    gloo(2, on_one_rank, tmp_path, True, kind)


def drawing_on_rank(group: Any, folder: Path) -> list[float]:
    """Return a rank's draws after a save, and again after the resumption."""
    model = torch.nn.Linear(2, 1)
    torch.manual_seed(7 + torch.distributed.get_rank(group))
    checkpoints = Checkpoints(folder, group=group)
    checkpoints.save(1, model)
    checkpoints.close()
    drawn = torch.rand(3).tolist()
    torch.manual_seed(0)
    Checkpoints(folder, group=group).resume(model)
    assert torch.rand(3).tolist() == drawn
    return drawn


def test_every_rank_draws_on_from_its_own_generator(gloo, tmp_path):
    first, second = gloo(2, drawing_on_rank, tmp_path)
    assert first != second
