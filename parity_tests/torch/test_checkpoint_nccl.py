"""Checkpoints where torch's defaults are a GPU's: a process group without a backend for the CPU, and the default device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ..support.selection import first

pytest.importorskip("torch")
pytest.importorskip("safetensors")


GPU_ONLY = """
import pathlib, sys
import torch
import torch.distributed as dist
from ring_attn_torch import Checkpoints

rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])
dist.init_process_group("cuda:gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks)
torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.AdamW(model.parameters())
checkpoints = Checkpoints(folder / "run")
for step in (1, 2):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()
    checkpoints.save(step, model, optimizer)
checkpoints.close()
assert checkpoints.steps() == [1, 2]
assert checkpoints.resume(model, optimizer).step == 2
dist.destroy_process_group()
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", first([2, 1]))
def test_a_default_group_without_a_cpu_backend_saves_as_nccl_alone_does(ranks: int, tmp_path):
    command = lambda rank: [sys.executable, "-c", GPU_ONLY, str(rank), str(ranks), str(tmp_path)]
    started = [subprocess.Popen(command(rank), cwd=Path(__file__).parents[2], stderr=subprocess.PIPE) for rank in range(ranks)]
    for process in started:
        _, said = process.communicate(timeout=600)
        assert process.returncode == 0, said.decode()


def test_copies_are_in_host_memory_whatever_the_default_device_is():
    import torch

    from ring_attn_torch.training.checkpoint_files import copy_to_host

    with torch.device("meta"):
        copies = copy_to_host({"weight": torch.ones(3, device="cpu"), "rng": torch.get_rng_state()})
    assert {x.device.type for x in copies.values()} == {"cpu"}
    assert copies["weight"].tolist() == [1, 1, 1]
