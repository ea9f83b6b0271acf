"""The process group of a ring, at its end."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ..support import warm
from ..support.programs import environment

DESTROYS = """
from pathlib import Path
import torch, torch.distributed as dist
import ring_attn_torch
from torch.utils.checkpoint import checkpoint

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
checkpoint(torch.sin, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
dist.all_reduce(torch.ones(2))
dist.destroy_process_group()
print([name for task in Path("/proc/self/task").iterdir() if "gloo" in (name := (task / "comm").read_text())])
"""


KEEPS_ITS_GRAPH = """
from pathlib import Path
import torch, torch.distributed as dist
from ring_attn_torch import RingTransformer, gather, gather_token, loss

dist.init_process_group("gloo")
model = RingTransformer(vocab=8, dim=8, depth=1, heads=1, auto_shard=True)
logits = model(torch.zeros(1, 8, dtype=torch.long))
x = torch.ones(1, 4, 2, requires_grad=True)
kept = loss(logits, torch.zeros(1, 8, dtype=torch.long)), gather(x).sum(), gather_token(x).sum()
sum(kept).backward()
dist.destroy_process_group()
threads = [name for task in Path("/proc/self/task").iterdir() if "gloo" in (name := (task / "comm").read_text())]
print(f"rank {x.grad.sum().item() > 0} {threads}\\n", end="")
"""


@pytest.mark.exhaustive
def test_nothing_keeps_the_group_alive_after_it_was_destroyed():
    """A thread of gloo that outlives it can abort Python's exit: see ring/groups.py. Fresh, for the order of imports."""
    done = subprocess.run([sys.executable, "-c", DESTROYS], capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.exhaustive
def test_nor_does_the_graph_of_a_result(tmp_path):
    (tmp_path / "keeps_its_graph.py").write_text(KEEPS_ITS_GRAPH)
    said = warm.run(["keeps_its_graph.py"], "torch", tmp_path, environment(), processes=2)
    assert sorted(said.split("\n")) == ["", "rank True []", "rank True []"]
