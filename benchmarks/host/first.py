"""The first call of a fresh process, without imports and the creation of the CUDA context."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from ..support.process import ROOT

PROGRAM = """
import json, time
import torch
began = time.perf_counter()
from ring_attn_torch import ring_attention
imported = time.perf_counter()
q, k, v = (torch.randn(1, 4096, 8, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
(q * k).backward(v.detach())  # torch imports sympy at the first gradient that is given: not our second
torch.cuda.synchronize()
ready = time.perf_counter()
out = ring_attention(q, k, v)
torch.cuda.synchronize()
forward = time.perf_counter()
out.backward(out.detach())
torch.cuda.synchronize()
print(json.dumps([imported - began, forward - ready, time.perf_counter() - forward]))
"""


def first() -> list[dict[str, Any]]:
    """Return the seconds of a process with an empty kernel cache, and of a second process with a full one."""
    with tempfile.TemporaryDirectory() as folder:
        return [{"cache of kernels": name, **_run(folder)} for name in ("empty", "full")]


def _run(folder: str) -> dict[str, float]:
    environment = {**os.environ, "TRITON_CACHE_DIR": folder, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    ran = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    return dict(zip(("import s", "forward s", "backward s"), json.loads(ran.stdout.splitlines()[-1]), strict=True))
