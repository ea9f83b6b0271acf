"""Rotary embeddings of torch: every shard's, far positions, half precision."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from ring_attn_core import LAYOUTS
from ring_attn_torch import (
    RotaryEmbedding,
    from_layout,
    positions,
    to_layout,
)

from ..support.models import (
    LENGTH,
    rotate,
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotary_of_every_shard_is_the_shard_of_the_rotated_whole(layout):
    x = np.random.default_rng(0).standard_normal((2, LENGTH, 3, 8)).astype(np.float32)
    shards = to_layout(torch.from_numpy(x), layout, 4).chunk(4, 1)
    rotary = RotaryEmbedding(8)
    turned = [rotary(shard, positions(layout, 4, LENGTH, rank)) for rank, shard in enumerate(shards)]
    together = from_layout(torch.cat(turned, 1), layout, 4, LENGTH)
    np.testing.assert_allclose(together, rotate(x.astype(np.float64), np.arange(LENGTH)), atol=2e-6)


def test_rotary_is_right_at_a_million_tokens_and_for_positions_of_every_row():
    where = np.stack([np.arange(LENGTH), 2**20 - 1 - 513 * np.arange(LENGTH)]).astype(np.int32)
    x = np.random.default_rng(0).standard_normal((2, LENGTH, 3, 64)).astype(np.float32)
    turned = RotaryEmbedding(64, base=500000.0)(torch.from_numpy(x), torch.from_numpy(where))
    for row in range(2):
        exact = rotate(x[row : row + 1].astype(np.float64), where[row], base=500000.0)
        np.testing.assert_allclose(turned[row : row + 1], exact, atol=1e-5)


def test_vmap_over_rows_or_positions_is_exact_without_a_warning():
    rotary, x, where = RotaryEmbedding(8), torch.randn(3, 2, 4, 1, 8), torch.arange(4)
    several = torch.stack([where, where + 1, where + 5])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        of_rows = torch.func.vmap(lambda x: rotary(x, where))(x)
        of_positions = torch.func.vmap(lambda where: rotary(x[0], where))(several)
    assert torch.equal(of_rows, torch.stack([rotary(each, where) for each in x]))
    assert torch.equal(of_positions, torch.stack([rotary(x[0], each) for each in several]))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_rotary_takes_positions_of_every_integer_dtype(dtype):
    where = np.linspace(0, min(np.iinfo(dtype).max, 2**20), LENGTH).astype(dtype)
    x = np.random.default_rng(0).standard_normal((1, LENGTH, 2, 16)).astype(np.float32)
    turned = RotaryEmbedding(16)(torch.from_numpy(x), torch.from_numpy(where))
    np.testing.assert_allclose(turned, rotate(x.astype(np.float64), where.astype(np.int64)), atol=1e-5)


def test_rotary_of_bfloat16_does_not_round_positions():
    where = np.arange(250, 250 + LENGTH, dtype=np.int32)
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((1, LENGTH, 2, 16))).bfloat16()
    turned = RotaryEmbedding(16).bfloat16()(x, torch.from_numpy(where))
    assert turned.dtype == torch.bfloat16
    exact = torch.from_numpy(rotate(x.double().numpy(), where)).bfloat16()
    assert (turned == exact).double().mean() > 0.99
    np.testing.assert_allclose(turned.float(), exact.float(), atol=2**-6)
