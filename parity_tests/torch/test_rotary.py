"""Rotary embeddings of torch: every shard's, far positions, half precision."""

from __future__ import annotations

import warnings

import torch

from ring_attn_torch import RotaryEmbedding


def test_vmap_over_rows_or_positions_is_exact_without_a_warning():
    rotary, x, where = RotaryEmbedding(8), torch.randn(3, 2, 4, 1, 8), torch.arange(4)
    several = torch.stack([where, where + 1, where + 5])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        of_rows = torch.func.vmap(lambda x: rotary(x, where))(x)
        of_positions = torch.func.vmap(lambda where: rotary(x[0], where))(several)
    assert torch.equal(of_rows, torch.stack([rotary(each, where) for each in x]))
    assert torch.equal(of_positions, torch.stack([rotary(x[0], each) for each in several]))
