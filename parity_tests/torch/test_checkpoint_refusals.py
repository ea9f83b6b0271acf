"""A checkpoint that is refused: on every rank, in the same words, and with nothing changed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ring_attn_core.model import checkpoint_folder
from ring_attn_torch import Checkpoints
from ring_attn_torch.training.checkpoint_files import save_error

from ..support.spawn import PerRank

pytest.importorskip("safetensors")


def made(seed: int = 0, lr: float = 0.1, **settings: Any) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=lr, **settings)


def step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.randn(2, 3)).square().mean().backward()
    optimizer.step()


def saved(folder: Path, group: Any = None) -> Path:
    model, optimizer = made()
    checkpoints = Checkpoints(folder, group=group)
    for number in (1, 2):
        step(model, optimizer)
        checkpoints.save(number, model, optimizer)
    checkpoints.close()
    return folder / "step-000000002"


def everything(model: Any, optimizer: Any) -> list[Any]:
    states = [x.clone() for p in model.parameters() for x in optimizer.state.get(p, {}).values()]
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    groups = [{name: x for name, x in group.items() if name != "params"} for group in optimizer.param_groups]
    return [[p.detach().clone() for p in model.parameters()], states, gradients, groups, torch.get_rng_state()]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def change(where: Path, values: dict[str, Any]) -> None:
    file = where / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def flipped(where: Path) -> None:
    file = next(where.glob("*.safetensors"))
    whole = bytearray(file.read_bytes())
    whole[-9] ^= 1
    file.write_bytes(whole)


def with_header(where: Path, text: str) -> None:
    """Replace what the header says of shards, in a checkpoint of an earlier version, which had no digests."""
    from safetensors.torch import load_file, save_file

    file = next(where.glob("*.safetensors"))
    save_file(load_file(file), file, {"DCP_SHARDING_INFO": text})
    change(where, {"files": None})


def group_with(where: Path, **values: Any) -> None:
    groups = json.loads((where / "run.json").read_text())["optimizer"]
    change(where, {"optimizer": [groups[0] | values]})


DAMAGE = {
    "bit flip": (flipped, r"safetensors is damaged, its SHA-256 is not that of the file"),
    "lr": (lambda where: group_with(where, lr="x"), r"lr of group 0 of the optimizer in .*run\.json is 'x', and here 0\.1"),
    "betas": (lambda where: group_with(where, betas=[1, "x"]), r"betas of group 0 of the optimizer in .*run\.json"),
    "groups": (lambda where: change(where, {"optimizer": ["x"]}), r"optimizer in .*run\.json must be a list of objects"),
    "text": (lambda where: change(where, {"optimizer": "x"}), r"optimizer in .*run\.json must be a list of objects"),
    "shards": (lambda where: with_header(where, "{}"), r"safetensors is damaged, DCP_SHARDING_INFO in its header"),
    "shards as a list": (lambda where: with_header(where, "[3]"), r"safetensors is damaged, DCP_SHARDING_INFO in its header"),
    "missing": (lambda where: next(where.glob("*.safetensors")).unlink(), r"safetensors is missing"),
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("stepped", [False, True])
def test_a_damaged_checkpoint_is_named_and_changes_no_bit(name: str, stepped: bool, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_folder, "LAG", 0.1)
    where = saved(tmp_path)
    damage, message = DAMAGE[name]
    damage(where)
    model, optimizer = made(5)
    if stepped:
        step(model, optimizer)
    with torch.no_grad():
        model.weight[0, 0] = -0.0
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match=message):
        Checkpoints(tmp_path).resume(model, optimizer)
    assert same(everything(model, optimizer), before)


def test_a_read_that_fails_at_its_end_changes_no_bit(tmp_path):
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    saved(tmp_path)
    model, optimizer = made(5)
    before = everything(model, optimizer)
    read = HuggingFaceStorageReader.read_data

    def torn(*arguments: Any) -> None:
        read(*arguments).wait()
        raise OSError(5, "Input/output error")

    with (
        patch.object(HuggingFaceStorageReader, "read_data", torn),
        pytest.raises(OSError, match=r"step-000000002 could not be read, and nothing has changed: .*Input/output"),
    ):
        Checkpoints(tmp_path).resume(model, optimizer)
    assert same(everything(model, optimizer), before)


def test_a_checkpoint_of_an_earlier_version_without_digests_is_resumed(tmp_path):
    change(saved(tmp_path), {"files": None})
    progress = Checkpoints(tmp_path).resume(*made(1))
    assert progress is not None and progress.step == 2


def test_the_error_of_the_lowest_failed_rank_is_quoted():
    error: Any = RuntimeError()
    error.failures = {3: (OSError("third"), None), 1: (OSError("first"), None)}
    assert str(save_error(7, error)).endswith("first (rank 1)")


def unshared_on_rank(group: Any, folder: Path) -> None:
    checkpoint_folder.LAG = 0.2
    Checkpoints(folder, group=group).save(1, *made())


def test_folders_that_are_not_one_are_refused_on_every_rank_before_anything_is_written(gloo, tmp_path):
    folders = [tmp_path / str(rank) for rank in range(3)]
    for outcome in gloo.outcomes(3, unshared_on_rank, PerRank(folders[0], folders[1], folders[0])):
        with pytest.raises(ValueError, match=r"(?s)rank 1 cannot see .*on a file system that all ranks share"):
            raise outcome
    assert [path.name for path in folders[0].iterdir()] == [".lock"]
    assert not folders[1].exists()


def objecting_on_rank(group: Any, folder: Path) -> float:
    saved(folder, group)
    torch.distributed.barrier(group)
    if torch.distributed.get_rank(group) == 1:
        model = torch.nn.Linear(3, 4)
        optimizer = torch.optim.AdamW(model.parameters())
    else:
        model, optimizer = made(1)
    before, began = [p.detach().clone() for p in model.parameters()], time.monotonic()
    with pytest.raises(ValueError, match=r"rank 1: .*step-000000002 holds does not fit this module: .*model\.weight"):
        Checkpoints(folder, group=group).resume(model, optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    assert not optimizer.state
    return time.monotonic() - began


def test_one_ranks_objection_to_a_checkpoint_is_raised_on_all_at_once(gloo, tmp_path):
    assert max(gloo(2, objecting_on_rank, tmp_path)) < 10


def late_on_rank(group: Any, folder: Path, lag: float) -> int:
    """Resume where rank 1 sees new checkpoints ``lag`` seconds late."""
    saved(folder, group)
    torch.distributed.barrier(group)
    began, exists, glob = time.monotonic(), Path.exists, Path.glob
    is_late = lambda path: torch.distributed.get_rank(group) == 1 and time.monotonic() < began + lag and "step-" in str(path)
    listed = lambda self, pattern, **how: (path for path in glob(self, pattern, **how) if not is_late(path))
    checkpoint_folder.LAG = 3.0
    with (
        patch.object(Path, "exists", lambda self: not is_late(self) and exists(self)),
        patch.object(
            Path, "is_file", lambda self: not is_late(self) and self.stat().st_mode & 0o100000 > 0 if exists(self) else False
        ),
        patch.object(Path, "glob", listed),
    ):
        progress = Checkpoints(folder, group=group).resume(*made(1))
    assert progress is not None
    return progress.step


@pytest.mark.exhaustive
def test_a_checkpoint_that_a_rank_sees_late_is_waited_for(gloo, tmp_path):
    assert gloo(2, late_on_rank, tmp_path / "late", 1.0) == [2, 2]
    words = "the newest checkpoint is 2 on rank 0, None on rank 1: all ranks must"
    gloo.refuse(words, 2, late_on_rank, tmp_path / "never", 60.0)
