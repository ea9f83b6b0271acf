"""Checkpoints of a run in PyTorch: exact to the bit after any kill, of one process or of shards on several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save

from ring_attn_torch import Checkpoints, RingTransformer

from ..support import warm
from ..support.models import TRANSFORMER
from ..support.programs import environment
from .models import shard_fully

STEPS = 5


def made(seed: int = 0, rate: float = 1e-2, **sizes: Any) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = RingTransformer(**TRANSFORMER | sizes)
    return model, torch.optim.AdamW(model.parameters(), lr=rate)


def train(model: Any, optimizer: Any, first: int = 0, last: int = STEPS) -> Any:
    """Steps ``first`` to ``last`` of a training that draws from torch's generator, after each of which it yields."""
    for step in range(first, last):
        optimizer.param_groups[0]["lr"] *= 0.9  # as a scheduler does
        ids = torch.randint(31, (2, 8))
        optimizer.zero_grad()
        model(ids).square().mean().backward()
        optimizer.step()
        yield step + 1


def run(folder: Path | None, seed: int = 0, last: int = STEPS) -> dict[str, Any]:
    """Weights after a run that resumes, if it can, and saves after every step."""
    model, optimizer = made(seed)
    first, checkpoints = 0, None
    if folder is not None:
        checkpoints = Checkpoints(folder)
        progress = checkpoints.resume(model, optimizer)
        first = progress.step if progress else 0
    for step in train(model, optimizer, first, last):
        if checkpoints is not None:
            checkpoints.save(step, model, optimizer, data=json.dumps({"batch": step}), more={"step": step})
    if checkpoints is not None:
        checkpoints.close()
    return dict(model.state_dict())


def assert_equal(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(got[name], x), name


def test_a_resumed_run_ends_in_the_same_bits(tmp_path):
    run(tmp_path, last=3)
    assert_equal(run(tmp_path, seed=1), run(None))


def test_a_checkpoint_holds_the_weights_at_the_time_of_the_call_of_save(tmp_path):
    model, optimizer = made()
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.resume(model, optimizer) is None
    [*train(model, optimizer)]
    saved = {name: x.clone() for name, x in model.state_dict().items()}
    checkpoints.save(7, model, optimizer, data="where", more={"seed": 3, "losses": [1.0, 0.1]})
    for p in model.parameters():
        p.data.fill_(torch.nan)
    checkpoints.wait()
    progress = checkpoints.resume(model, optimizer)
    assert progress == (7, "where", {"seed": 3, "losses": [1.0, 0.1]})
    assert_equal(dict(model.state_dict()), saved)


def test_a_checkpoint_before_the_first_step_changes_nothing(tmp_path):
    model, optimizer = made()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(0, model, optimizer)
    assert not optimizer.state
    [*train(model, optimizer)]
    other, fresh = made(1)
    [*train(other, fresh, last=1)]
    checkpoints.resume(other, fresh)
    [*train(other, fresh)]
    assert_equal(dict(other.state_dict()), dict(model.state_dict()))


def test_the_last_few_stay_without_a_pickle_among_them(tmp_path):
    run(tmp_path)
    assert Checkpoints(tmp_path).steps() == [3, 4, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock"] + [f"step-{step:09}" for step in (3, 4, 5)]
    assert {path.suffix for path in tmp_path.glob("*/*")} == {".json", ".safetensors"}


def test_a_damaged_or_foreign_checkpoint_is_named_and_changes_nothing(tmp_path):
    run(tmp_path, last=2)
    model, optimizer = made(5)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    newest = tmp_path / "step-000000002"
    file = next(newest.glob("*.safetensors"))
    whole, said = file.read_bytes(), (newest / "run.json").read_text()
    file.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=r"safetensors of \d+ bytes is truncated"):
        Checkpoints(tmp_path).resume(model, optimizer)
    file.write_bytes(whole)
    for text, message in (("{", "run.json cannot be read as JSON"), ("{}", "run.json says nothing of step, data, more, config")):
        (newest / "run.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            Checkpoints(tmp_path).resume(model, optimizer)
    assert_equal(dict(model.state_dict()), before)
    (newest / "run.json").write_text(said)
    for other in (torch.nn.Linear(3, 2), torch.nn.Embedding(31, 7)):
        with pytest.raises(ValueError, match=r"step-000000002 holds does not fit this module: model\.weight is missing"):
            Checkpoints(tmp_path).resume(other)
    with pytest.raises(ValueError, match=r"has groups of \[20\] parameters, and this one of \[1\]"):
        Checkpoints(tmp_path).resume(model, torch.optim.AdamW([next(model.parameters())]))
    with pytest.raises(ValueError, match=r"the optimizer of .* is 'AdamW', and this one 'SGD': make it as it was"):
        Checkpoints(tmp_path).resume(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for damaged in newest.iterdir():
        damaged.unlink()
    newest.rmdir()
    progress = Checkpoints(tmp_path).resume(model, optimizer)
    assert progress is not None and progress.step == 1


KILLED = """
import os, pathlib, signal, sys
import torch.distributed.checkpoint.state_dict  # once, and not in every child
import safetensors.torch
from ring_attn_core.model import checkpoint_folder
from parity_tests.torch.test_checkpoint import run

folder = pathlib.Path(sys.argv[1])
checkpoint_folder.LAG = 0.1
torch.set_num_threads(1)  # a process with more threads must not fork

def dying(function, at, calls=[0]):
    def call(*arguments, **keywords):
        calls[0] += 1
        if calls[0] == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **keywords)
    return call

for at in range(2, 99, 3):
    child = os.fork()
    if child == 0:
        for where, name in (pathlib.Path, "rename"), (pathlib.Path, "write_text"), (os, "fsync"), (os, "rmdir"):
            setattr(where, name, dying(getattr(where, name), at))
        torch.save(run(folder, seed=at), folder / "final.pt")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
print(at)
"""


@pytest.mark.exhaustive
def test_a_run_killed_at_every_step_of_its_saves_ends_in_the_same_bits(tmp_path):
    """Killed at its second operation on the disk, then, resumed, at its fifth, and so on until it comes to its end."""
    folder = tmp_path / "run"
    run(folder, last=1)
    (tmp_path / "killed.py").write_text(KILLED)
    assert int(warm.run(["killed.py", str(folder)], "torch", tmp_path, environment())) > 9
    assert_equal(torch.load(folder / "final.pt", weights_only=True), run(None))


def sharded_on_rank(group: Any, folder: Path, first: int, last: int) -> dict[str, Any]:
    """Whole weights and moments after steps of a training with FSDP2, all ranks with the same batch."""
    torch.manual_seed(first)
    model: Any = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.ReLU(), torch.nn.Linear(5, 1))  # 5 and 1 over 2 and 4 ranks
    shard_fully(group, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with torch.no_grad():  # after this FSDP2's root holds gathered weights, which are not the optimizer's
        model(torch.ones(3, 7))
    checkpoints = Checkpoints(folder, group=group)
    progress = checkpoints.resume(model, optimizer)
    assert (progress.step if progress else 0) == first
    whole = lambda: {name: x.full_tensor().detach().clone() for name, x in model.state_dict().items()}
    before = whole()
    for step in range(first, last):
        optimizer.zero_grad()
        model(torch.full((3, 7), 0.1 * step)).square().mean().backward()
        optimizer.step()
        checkpoints.save(step + 1, model, optimizer)
    checkpoints.close()
    moments = {
        f"{i}": optimizer.state[p]["exp_avg"].full_tensor() for i, p in enumerate(model.parameters()) if p in optimizer.state
    }
    return {"before": before, "after": whole(), "moments": moments}


def test_shards_are_resumed_on_another_number_of_ranks(gloo, tmp_path):
    saved = gloo(2, sharded_on_rank, tmp_path, 0, 3)[0]
    for ranks in (4, 8):  # 8 are the default group, which saves in the background
        resumed = gloo(ranks, sharded_on_rank, tmp_path, 3, 3)[ranks - 1]
        assert_equal(resumed["before"], saved["after"])
        assert_equal(resumed["moments"], saved["moments"])


@pytest.mark.slow
def test_shards_of_a_resumed_run_end_in_the_same_bits(gloo, tmp_path):
    gloo(8, sharded_on_rank, tmp_path / "stopped", 0, 3)
    resumed = gloo(8, sharded_on_rank, tmp_path / "stopped", 3, 5)[0]
    assert_equal(resumed["after"], gloo(8, sharded_on_rank, tmp_path / "whole", 0, 5)[0]["after"])


def full_on_rank(group: Any, folder: Path) -> None:
    model, optimizer = made()
    checkpoints = Checkpoints(folder, group=group)
    full = OSError("No space left on device") if torch.distributed.get_rank(group) == 1 else None
    with patch("safetensors.torch.save", side_effect=full, wraps=save):
        checkpoints.save(1, model, optimizer)
        checkpoints.wait()


def refused_on_rank(group: Any, folder: Path) -> None:
    Checkpoints(folder, group=group).save(1, made()[0], data=3)  # type: ignore[arg-type]


def test_a_rank_that_fails_fails_on_all(gloo, tmp_path):
    for outcome in gloo.outcomes(2, full_on_rank, tmp_path):
        assert isinstance(outcome, OSError)
        assert "of step 1 could not be saved" in str(outcome)
        assert "No space left on device (rank 1)" in str(outcome)
    assert Checkpoints(tmp_path).steps() == []
    gloo.refuse("rank 0: data must be the text", 2, refused_on_rank, tmp_path)
