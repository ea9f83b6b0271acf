"""The strategy "push" between processes that share one GPU: exact, and the same bits at every run."""

# pyright: reportArgumentType=false

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ring_attn_core import causal, full, sliding_window

from ..support.cases import Case, check
from ..support.spawn import Ranks
from ..torch import ring as on_torch
from .test_peers import BOUND, check_survivors, repeated

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CASES = [
    Case(ranks=2, length=61, head_dim=64, v_dim=64, dtype="bfloat16"),
    Case("contiguous", sliding_window(40), 2, length=301, head_dim=64, v_dim=64, kv_heads=1, dtype="bfloat16"),
    Case("striped", full(), 4, length=148, kv_length=200, dtype="float16", sinks=True),
    Case("zigzag", causal(), 4, length=999, key_mask="random", extents="documents", dtype="bfloat16"),
    Case("contiguous", causal(), 4, length=61, key_extents="any", dropout_rate=0.3),
]
OVERLAPPING = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}


@pytest.fixture(scope="module")
def gloo():
    """Four processes joined by gloo: NCCL refuses two ranks on one GPU, and symmetric memory takes them by this variable."""
    pool = Ranks("gloo", 4, OVERLAPPING)
    yield pool
    pool.close()


def on_first_gpu(group: Any, case: Case, *shards: Any) -> Any:
    torch.cuda.set_device(0)
    with patch.object(on_torch.dist, "get_backend_config", lambda *_: "cuda"):
        return on_torch.on_rank(group, case, *shards)


def repeated_on_first_gpu(group: Any, times: int) -> int:
    torch.cuda.set_device(0)
    return repeated(group, times)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_push_is_exact(gloo, case):
    check(case, on_torch.run(gloo, replace(case, strategy="push"), on_first_gpu), BOUND)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_hundred_runs_with_random_delays_have_the_same_bits(gloo, ranks):
    assert gloo(ranks, repeated_on_first_gpu, 100) == [0] * ranks


@pytest.mark.parametrize("step", range(5))
def test_no_process_outlives_a_killed_rank_by_more_than_the_timeout(step, tmp_path):
    """The last of three ranks ends before the call, or at the ``step``-th of its four arrivals of keys."""
    check_survivors(tmp_path, 3, "gloo", step, **OVERLAPPING)
