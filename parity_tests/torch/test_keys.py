"""Tests of hidden keys: they become 0, in any layout of the tensor in memory."""

from __future__ import annotations

import pytest
import torch

from ring_attn_torch.attend.keys import zero_where

MADE = {
    "whole": lambda dtype: torch.randn(2, 5, 3, 8).to(dtype),
    "odd width": lambda dtype: torch.randn(2, 5, 3, 7).to(dtype),
    "no batch row": lambda dtype: torch.empty(0, 0, 3, 8, dtype=dtype).as_strided((0, 0, 3, 8), (24, 8, 8, 0)),
    "no token": lambda dtype: torch.randn(2, 0, 3, 8).to(dtype),
    "a slice": lambda dtype: torch.randn(2, 6, 3, 9).to(dtype)[:, 1:, :, :8],
    "one number in": lambda dtype: torch.randn(241).to(dtype)[1:].view(2, 5, 3, 8),
    "a stride of nothing": lambda dtype: torch.randn(99).to(dtype).as_strided((1, 4, 3, 8), (97, 24, 8, 1)),
}
"""Tensors [b s h d] of a dtype."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", MADE)
def test_nan_in_hidden_keys_becomes_zero_and_the_rest_stays(name, dtype):
    x = MADE[name](dtype)
    where = torch.rand(*x.shape[:2], 1, 1) < 0.5
    x[where.expand_as(x)] = torch.nan
    given = x.clone()
    made = zero_where(x, where)
    assert torch.equal(made, torch.where(where, torch.zeros((), dtype=dtype), x))
    assert torch.equal(x.isnan(), given.isnan())
    assert made.dtype == dtype and (not made.numel() or made.data_ptr() != x.data_ptr())
