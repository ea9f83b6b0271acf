"""FlashAttention-2, cuDNN and, where installed, FlashAttention-4 on one GPU: a single rank, and rings emulated rank by rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ring_attn_core import Band, causal, full

from ..support.cases import Case, check

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

CASES = [
    Case("zigzag", causal(), 1, length=301, head_dim=64, v_dim=64, dtype="bfloat16"),
    Case("zigzag", causal(), 3, length=500, head_dim=128, v_dim=128, heads=4, kv_heads=1, dtype="float16"),
    Case("striped", Band(3), 4, length=307, head_dim=64, v_dim=64, sinks=True, dtype="bfloat16"),
    Case("contiguous", full(), 2, length=256, kv_length=391, head_dim=96, v_dim=96, dtype="bfloat16", poison=True),
]


@pytest.mark.filterwarnings("ignore")  # FlashAttention-4 warns of its own old names
@pytest.mark.parametrize("backend", ["flash", "flash4", "cudnn"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_their_kernels_round_the_ring(backend, case):
    from .emulate import on_torch

    if backend == "flash4":
        pytest.importorskip("flash_attn.cute")
    case = case.given(dlse=np.zeros_like(case.arrays["dlse"]))
    check(case, on_torch(case, backend), allowed_error=lambda case, name: 1e-5 if name == "lse" else WORST)


WORST = 8e-3
"""They round out after every piece and dq, dk and dv of every piece to 16 bits: twice what is seen of one launch."""
