"""A rank that is killed in the middle of a pass: every other rank that fails names the ranks that it was waiting for."""

from __future__ import annotations

import os
import re
import signal
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ring_attn_torch import full, ring_attention
from ring_attn_torch.attend import blockwise

from ..support import warm
from ..support.selection import first

RANKS = 4


def work(rank: int, store: str, when: str, how: str, log: str) -> None:
    """Call twice; rank 3 is killed in the second call. The traceback of an error goes to the file ``log``."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT, 0o600), 2)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
    attend: Any = ring_attention
    if how == "compiled":
        attend = torch.compile(ring_attention, backend="aot_eager", fullgraph=True)
    q = torch.ones(1, 8, 2, 4, requires_grad=True)
    attend(q, q, q, mask=full()).sum().backward()
    if rank == 3:
        setattr(blockwise, {"forward": "attend", "backward": "attend_backward"}[when], killed)
    attend(q, q, q, mask=full()).sum().backward()


def killed(*arguments: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("when", "how"), first([("backward", "compiled"), ("forward", "eager"), ("backward", "eager"), ("forward", "compiled")], 0, 2)
)
def test_every_rank_that_fails_names_the_ranks_that_it_waited_for(tmp_path, when, how):
    context, files = warm.context("torch"), [tmp_path / f"log{rank}" for rank in range(RANKS)]
    started = [
        context.Process(target=work, args=(rank, str(tmp_path / "store"), when, how, str(file)))
        for rank, file in enumerate(files)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(600)
    logs, codes = [file.read_text() for file in files], [process.exitcode for process in started]
    assert codes[3] == -signal.SIGKILL
    neighbours = {0: "rank 3, which sends to it, and rank 1", 2: "rank 1, which sends to it, and rank 3"}
    for rank, words in neighbours.items():
        assert codes[rank] == 1, logs[rank]
        assert f"rank {rank} lost the ring while it waited for {words}, which takes what it sends" in logs[rank]
    if codes[1]:  # it has no killed neighbour, and may have got all that it needs
        assert re.search(r"rank 1 lost the ring while it waited for rank 0, .* rank 2,", logs[1]), logs[1]
