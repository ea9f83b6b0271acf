"""The strategy "push" between real GPUs: the ring's bits, the same at every run, and no process that hangs."""

# pyright: reportArgumentType=false

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ring_attn_core import causal, full, sliding_window
from ring_attn_core.problem.options import Options
from ring_attn_torch import ring_attention
from ring_attn_torch.call.decide import decide
from ring_attn_torch.call.prepare import Arrays, problem_of

from ..support.cases import Case, check
from ..support.combinations import EVERYTHING
from ..support.programs import ROOT
from ..support.spawn import Ranks
from ..support.warm import free_port
from ..torch import ring as on_torch
from .tolerance import bound_on_hopper

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs of one host, found {GPUS}")
BOUND = bound_on_hopper if GPUS and torch.cuda.get_device_capability() == (9, 0) else None
CASES = [
    Case(ranks=2, length=61, head_dim=64, v_dim=64, dtype="bfloat16"),
    Case("contiguous", sliding_window(40), 2, length=301, head_dim=64, v_dim=64, kv_heads=1, dtype="bfloat16"),
    Case("striped", full(), GPUS, length=37 * max(GPUS, 1), kv_length=50 * max(GPUS, 1), dtype="float16", sinks=True),
    Case("zigzag", causal(), GPUS, length=999, key_mask="random", extents="documents", dtype="bfloat16"),
    Case("contiguous", causal(), GPUS, length=61, key_extents="any", dropout_rate=0.3),
    *(case for case in EVERYTHING if case.ranks <= GPUS),
]
PROGRAM = """
import os, sys
import torch, torch.distributed as dist
from datetime import timedelta
from ring_attn_torch import ring_attention
from ring_attn_torch.ring.strategies.push import PushPass

rank, ranks, step = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(sys.argv[1])
torch.cuda.set_device(rank % torch.cuda.device_count())
dist.init_process_group(sys.argv[2], timeout=timedelta(seconds=15))
q = torch.randn(1, 256, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
attend = lambda: ring_attention(q, q, q, strategy="push").float().sum().backward()
attend()
torch.cuda.synchronize()
arrived, steps = PushPass.arrived, []

def dies(self, i):
    steps.append(i)
    if rank == ranks - 1 and len(steps) == step:
        os._exit(9)
    return arrived(self, i)

PushPass.arrived = dies
if rank == ranks - 1 and step == 0:
    os._exit(9)
attend()
torch.cuda.synchronize()
print("went on")
"""


@pytest.fixture(scope="module")
def nccl():
    pool = Ranks("nccl", GPUS)
    yield pool
    pool.close()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_push_is_exact_and_out_has_the_rings_bits(nccl, case):
    ours, ring = (on_torch.run(nccl, replace(case, strategy=name)) for name in ("push", "ring"))
    check(case, ours, BOUND)
    for name in ("out", "lse", "dq"):
        assert (getattr(ours, name) == getattr(ring, name)).all(), name


@pytest.mark.parametrize("ranks", sorted({2, max(GPUS, 2)}))
def test_a_hundred_runs_with_random_delays_have_the_same_bits(nccl, ranks):
    assert nccl(ranks, repeated, 100) == [0] * ranks


def repeated(group: Any, times: int) -> int:
    """Return how many of ``times`` runs differ from the first; calls of two sizes alternate."""
    generator = torch.Generator().manual_seed(torch.distributed.get_rank(group))
    make = lambda tokens, heads: torch.randn(1, tokens, heads, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    shards = [[make(tokens, heads) for heads in (8, 2, 2)] for tokens in (2048, 334)]
    first: dict[int, Any] = {}
    differ = 0
    for number in range(times):
        which = number % 2
        delay = lambda: torch.cuda._sleep(int(torch.randint(1, 3_000_000, (), generator=generator)))
        delay()
        out = ring_attention(*shards[which], group=group, strategy="push")
        delay()
        found = [out.detach(), *torch.autograd.grad(out, shards[which], torch.ones_like(out))]
        expected = first.setdefault(which, found)
        differ += not all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    return differ


def test_auto_takes_push_on_the_gpus_of_a_host_and_another_strategy_in_a_cuda_graph(nccl):
    assert nccl(GPUS, automatic) == [("push", True, "ring", True)] * GPUS


def automatic(group: Any) -> tuple[str, bool, str, bool]:
    """Return what "auto" takes, if out has the ring's bits, what a graph takes, and if its out has them too."""
    q = torch.randn(1, 4096, 4, 64, device="cuda", dtype=torch.bfloat16)
    problem = problem_of(q, q, q, Arrays(), GPUS, Options())
    with torch.no_grad():
        expected, out = ring_attention(q, q, q, group=group, strategy="ring"), ring_attention(q, q, q, group=group)
        taken, graph = decide(problem, Arrays(), group, q.device).problem.strategy, torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            inside = decide(problem, Arrays(), group, q.device).problem.strategy
            captured = ring_attention(q, q, q, group=group)
        graph.replay()
        torch.cuda.synchronize()
    return taken, torch.equal(out, expected), inside, torch.equal(captured, expected)


@pytest.mark.parametrize("step", [0, 1, GPUS - 1, GPUS, 2 * GPUS - 2] if GPUS > 2 else [0, 1, 2])
def test_no_process_outlives_a_killed_rank_by_more_than_the_timeout(step, tmp_path):
    """The last rank ends before the call, or at the ``step``-th arrival of keys.

    There are GPUS - 1 arrivals in the forward and as many in the backward.
    At the last arrival a survivor may have all that it needs from it, and ends well.
    """
    check_survivors(tmp_path, GPUS, "nccl", step)


def check_survivors(folder: Path, ranks: int, backend: str, step: int, **environment: str) -> None:
    """Run PROGRAM on ``ranks`` processes, and assert that those that outlive the last one name it and end."""
    (folder / "kill.py").write_text(PROGRAM)
    began = time.monotonic()
    command = [sys.executable, str(folder / "kill.py"), str(step), backend]
    failed, said = ended(command, ranks, environment)
    while "EADDRINUSE" in said[0]:  # another process took the port after it was found free
        began = time.monotonic()
        failed, said = ended(command, ranks, environment)
    assert all(failed) if step < 2 * ranks - 2 else any(failed[:-1]), said
    survivors = "".join(said[:-1])
    assert "lost the ring" in survivors or "did not come to the same call" in survivors, survivors
    assert time.monotonic() - began < 200


def ended(command: list[str], ranks: int, environment: dict[str, str]) -> tuple[list[bool], list[str]]:
    """Return for each rank's process if it failed, and its error output."""
    port = str(free_port())
    of = lambda rank: (
        os.environ
        | environment
        | {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        }
    )
    processes = [subprocess.Popen(command, env=of(rank), stderr=subprocess.PIPE, text=True) for rank in range(ranks)]
    said = [process.communicate(timeout=240)[1] for process in processes]
    return [process.returncode != 0 for process in processes], said
