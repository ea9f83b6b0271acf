"""The first calls of fresh processes with an empty kernel cache, without imports and the creation of the CUDA context.

Each process makes the calls of ``CALLS`` one after the other, so that a later row shows what its call compiles anew. With one GPU
the ring of 2 in PyTorch is left out, and JAX lowers the ring of 2 for this GPU without running it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from ..support.process import ROOT

CALLS = """
import json, os, sys, time
PLAIN = dict(batch=1, tokens=4096, heads=32, kv_heads=8, dim=128)
CALLS = {
    "causal, 4,096 tokens": PLAIN,
    "8,192 tokens": PLAIN | dict(tokens=8192),
    "3 x 1,001 tokens": PLAIN | dict(batch=3, tokens=1001),
    "heads 16/4": PLAIN | dict(heads=16, kv_heads=4),
    "softcap": PLAIN | dict(softcap=20.0),
    "heads of 64": PLAIN | dict(dim=64),
}
STRATEGIES = {name: PLAIN | dict(strategy=name) for name in ("direct", "gather", "ulysses")}
rows = {}
"""

TORCH = """
import torch
import torch.distributed as dist
from ring_attn_torch import ring_attention
ranks = int(os.environ.get("WORLD_SIZE", 1))
if ranks > 1:
    torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl")
    x = torch.ones(2, device="cuda")
    dist.all_reduce(x)
x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
(x * x).backward(x.detach())  # torch imports sympy at the first gradient that is given: not our second
torch.cuda.synchronize()
for name, at in {**CALLS, **(STRATEGIES if ranks > 1 else {})}.items():
    batch, tokens, heads, kv_heads, dim = (at[key] for key in PLAIN)
    options = {key: value for key, value in at.items() if key not in PLAIN}
    tokens += tokens % 2
    of = lambda heads: torch.randn(batch, tokens, heads, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    q, k, v = of(heads), of(kv_heads), of(kv_heads)
    torch.cuda.synchronize()
    began = time.perf_counter()
    out = ring_attention(q, k, v, **options)
    torch.cuda.synchronize()
    forward = time.perf_counter()
    out.backward(out.detach())
    torch.cuda.synchronize()
    rows[name] = {"forward s": forward - began, "backward s": time.perf_counter() - forward}
if int(os.environ.get("RANK", 0)) == 0:
    print(json.dumps(rows))
if ranks > 1:
    dist.destroy_process_group()
"""

JAX = """
import jax
ranks, lower = int(os.environ["RANKS"]), os.environ["LOWER"] == "1"
if lower:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", ranks)
import jax.numpy as jnp
from ring_attn_jax import sharded_ring_attention
from ring_attn_jax import launch
mesh = jax.make_mesh((ranks,), ("seq",))
jax.block_until_ready(jnp.ones(8) + 1)
for name, at in CALLS.items():
    batch, tokens, heads, kv_heads, dim = (at[key] for key in PLAIN)
    options = {key: value for key, value in at.items() if key not in PLAIN}
    tokens = (tokens + tokens % 2) * ranks
    where = jax.NamedSharding(mesh, jax.P(None, "seq"))
    of = lambda heads: jax.device_put(jax.random.normal(jax.random.key(0), (batch, tokens, heads, dim), jnp.bfloat16), where)
    attend = lambda q, k, v: sharded_ring_attention(q, k, v, mesh=mesh, layout="zigzag", **options)
    loss = lambda *arrays: (attend(*arrays).astype(jnp.float32) ** 2).mean()
    arrays = jax.block_until_ready((of(heads), of(kv_heads), of(kv_heads)))
    began = time.perf_counter()
    program = jax.jit(jax.grad(loss, (0, 1, 2)))
    if lower:
        with launch.compile_for(90):
            program.trace(*arrays).lower(lowering_platforms=("cuda",))
        rows[name] = {"lowered s": time.perf_counter() - began}
    else:
        jax.block_until_ready(program(*arrays))
        rows[name] = {"gradient s": time.perf_counter() - began}
print(json.dumps(rows))
"""


def first(root: Path = ROOT) -> list[dict[str, Any]]:
    """Return the seconds of each call by process: PyTorch on one GPU with an empty and a full cache, on a ring of 2, and JAX."""
    rows = []
    alone = torch.cuda.device_count() < 2
    with tempfile.TemporaryDirectory() as folder:
        rows += _rows("PyTorch, one GPU, empty cache", [_start(TORCH, folder, root)])
        rows += _rows("PyTorch, one GPU, full cache", [_start(TORCH, folder, root)])
    if not alone:
        folder = tempfile.mkdtemp()
        ring = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "WORLD_SIZE": "2"}
        rows += _rows(
            "PyTorch, ring of 2",
            [_start(TORCH, folder, root, ring | {"RANK": str(rank)}) for rank in range(2)],
        )
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            lower = str(int(ranks == 2 and alone))
            name = f"JAX, {'ring of 2' if ranks == 2 else 'one GPU'}{', lowered only' if lower == '1' else ''}"
            rows += _rows(name, [_start(JAX, folder, root, {"RANKS": str(ranks), "LOWER": lower})])
    return rows


def _start(program: str, folder: str, root: Path, more: dict[str, str] | None = None) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(root), *(x for x in sys.path if Path(x) != ROOT)])
    environment = os.environ | {"TRITON_CACHE_DIR": folder, "PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    environment |= more or {}
    return subprocess.Popen([sys.executable, "-P", "-c", CALLS + program], env=environment, stdout=subprocess.PIPE, text=True)


def _rows(name: str, processes: list[subprocess.Popen[str]]) -> list[dict[str, Any]]:
    said = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        return [{"process": name, "call": "failed"}]
    found = json.loads(next(text for text in said if text.strip()).splitlines()[-1])
    return [{"process": name, "call": call, **seconds} for call, seconds in found.items()]
