"""A rank that is killed in the middle of a pass: every other rank that fails names the ranks that it was waiting for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..support.selection import first

RANKS = 4

PROGRAM = """
import os, signal, sys
from datetime import timedelta

import torch
import torch.distributed as dist

from ring_attn_torch import full, ring_attention
from ring_attn_torch.attend import blockwise

rank, store, when, compiled = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4] == "compiled"
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=4, timeout=timedelta(seconds=60))
attend = ring_attention
if compiled:
    attend = torch.compile(ring_attention, backend="aot_eager", fullgraph=True)
q = torch.ones(1, 8, 2, 4, requires_grad=True)
attend(q, q, q, mask=full()).sum().backward()


def killed(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)


if rank == 3:
    setattr(blockwise, {"forward": "attend", "backward": "attend_backward"}[when], killed)
attend(q, q, q, mask=full()).sum().backward()
"""


@pytest.mark.parametrize(
    ("when", "how"), first([("backward", "compiled"), ("forward", "eager"), ("backward", "eager"), ("forward", "compiled")], 0, 2)
)
def test_every_rank_that_fails_names_the_ranks_that_it_waited_for(tmp_path, when, how):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py")]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    arguments = str(tmp_path / "store"), when, how
    started = [
        subprocess.Popen([*command, str(rank), *arguments], stderr=subprocess.PIPE, text=True, env=environment)
        for rank in range(RANKS)
    ]
    logs = [process.communicate(timeout=600)[1] for process in started]
    assert started[3].returncode == -9
    neighbours = {0: "rank 3, which sends to it, and rank 1", 2: "rank 1, which sends to it, and rank 3"}
    for rank, words in neighbours.items():
        assert started[rank].returncode == 1, logs[rank]
        assert f"rank {rank} lost the ring while it waited for {words}, which takes what it sends" in logs[rank]
    if started[1].returncode:  # it has no killed neighbour, and may have got all that it needs
        assert re.search(r"rank 1 lost the ring while it waited for rank 0, .* rank 2,", logs[1]), logs[1]
