"""Dropout in PyTorch: the same set for any seed, a tensor too, and from any row and head on."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from ring_attn_core import full
from ring_attn_core.dropout import WORD, keep_mask
from ring_attn_torch import ring_attention
from ring_attn_torch.attend import dropout

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


@pytest.mark.parametrize("offset", [(WORD, WORD), (WORD - 1, 0)])
def test_batch_rows_and_heads_are_counted_modulo_2_to_the_32(offset):
    draw = dropout.dropout_state(dropout.Dropout(5, offset), torch.device("cpu"))
    positions = torch.arange(40)
    got = dropout.keep_mask(dropout.philox_keys(draw, 3, 2), 0.3, positions, positions)
    np.testing.assert_array_equal(got, keep_mask(5, 0.3, 3, 2, np.arange(40), np.arange(40), offset))


def test_dropout_offset_is_the_global_index_of_the_first_batch_row_and_head():
    case = one_hot(Case(mask=full(), kv_heads=4, v_dim=37, dropout_rate=0.3, batch=3))
    q, k, v = (torch.from_numpy(case.arrays[name]) for name in "qkv")
    call = partial(ring_attention, mask=full(), layout="striped", dropout_rate=0.3, dropout_seed=case.seed)
    part = [x[1:, :, 2:] for x in (q, k, v)]
    for offset in ((1, 2), (torch.tensor(1), torch.tensor(2))):
        assert torch.equal(call(*part, dropout_offset=offset) > 0, call(q, k, v)[1:, :, 2:] > 0)
