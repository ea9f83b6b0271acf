"""Dropout in PyTorch: the same set for any seed, a tensor too, and from any row and head on."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from ring_attn_core import full
from ring_attn_torch import ring_attention

from ..support.cases import Case, check_kept, one_hot


@pytest.mark.parametrize("seed", [0, 2**40 + 3, -1, -(2**63)])
def test_a_seed_may_be_any_int64_and_a_tensor(seed):
    q = torch.randn(1, 6, 2, 4)
    dropped = [ring_attention(q, q, q, dropout_rate=0.5, dropout_seed=x) for x in (seed, torch.tensor(seed))]
    assert torch.equal(*dropped)
    case = one_hot(Case(mask=full(), ranks=1, v_dim=37, dropout_rate=0.3, seed=seed))
    q, k, v = (torch.from_numpy(case.arrays[name]) for name in "qkv")
    out = ring_attention(q, k, v, mask=full(), layout="striped", dropout_rate=0.3, dropout_seed=torch.tensor(seed))
    check_kept(case, out.numpy())


def test_dropout_offset_is_the_global_index_of_the_first_batch_row_and_head():
    case = one_hot(Case(mask=full(), kv_heads=4, v_dim=37, dropout_rate=0.3, batch=3))
    q, k, v = (torch.from_numpy(case.arrays[name]) for name in "qkv")
    call = partial(ring_attention, mask=full(), layout="striped", dropout_rate=0.3, dropout_seed=case.seed)
    part = [x[1:, :, 2:] for x in (q, k, v)]
    for offset in ((1, 2), (torch.tensor(1), torch.tensor(2))):
        assert torch.equal(call(*part, dropout_offset=offset) > 0, call(q, k, v)[1:, :, 2:] > 0)
