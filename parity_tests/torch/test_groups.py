"""The process group of a ring, at its end."""

from __future__ import annotations

import subprocess
import sys

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


def test_nothing_keeps_the_group_alive_after_it_was_destroyed():
    """A thread of gloo that outlives it can abort Python's exit: see ring/groups.py."""
    done = subprocess.run([sys.executable, "-c", DESTROYS], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
