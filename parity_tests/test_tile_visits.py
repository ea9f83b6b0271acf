"""Packed documents cost what they see: which tiles a call visits, counted, against the tiles that hold a visible pair."""

from __future__ import annotations

from itertools import product
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from ring_attn_core import LAYOUTS, Band, RingPlan, causal, full
from ring_attn_core.kernels.tile_sizes import blockwise_tiles
from ring_attn_core.reference.oracle import visible
from ring_attn_jax.attend import tiles as jax_tiles
from ring_attn_jax.attend.score import Score as JaxScore
from ring_attn_torch.attend import tiles as torch_tiles
from ring_attn_torch.attend.keys import Keys
from ring_attn_torch.attend.score import Score as TorchScore

TOKENS, DOCUMENTS, BLOCK = 2048, 8, 16


def packed(equal: bool) -> np.ndarray:
    """int32 [2, tokens, 2]: two batch rows of eight documents, of one length or of many."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(2):
        cuts = np.arange(1, DOCUMENTS) * TOKENS // DOCUMENTS if equal else np.sort(rng.integers(1, TOKENS, DOCUMENTS - 1))
        edges = np.array([0, *cuts, TOKENS])
        rows.append(np.stack([edges[:-1], edges[1:]], -1)[np.searchsorted(edges, np.arange(TOKENS), "right") - 1])
    return np.stack(rows).astype(np.int32)


def visits_in_torch(extents: np.ndarray, rows: torch_tiles.Rows) -> int:
    b, s, _ = extents.shape
    q, kv = torch.empty(b, s, 1, 1), torch.empty(b, s, 1, 2)
    score = TorchScore(1.0, None, 0.0, extents=torch.from_numpy(extents))
    of_batches = torch_tiles.TileInputs.all(q, Keys(kv), rows, score)
    return sum(1 for inputs in of_batches for queries in inputs.query_tiles() for _ in inputs.pairs(queries))


@jax.jit
def visits_in_jax(extents: jax.Array, rows: jax.Array) -> jax.Array:
    b, s, _ = extents.shape
    score = JaxScore(1.0, None, 0.0, extents=extents)
    inputs = jax_tiles.TileInputs(jnp.empty((b, s, 1, 1)), jnp.empty((b, s, 1, 2)), None, None, rows, score, None)
    visits = lambda index, n: inputs.over_keys(inputs.query_tile(index), lambda pair, n: n + 1, n)
    return jax.lax.fori_loop(0, inputs.query_tiles, visits, 0)


def tiles_with_a_visible_pair(sees: np.ndarray, plan: RingPlan, rank: int, shift: int) -> int:
    total = 0
    for _, q_len, q_start, stride in plan.q_runs[rank]:
        for _, k_len, k_start, _ in plan.k_runs[(rank - shift) % plan.ranks]:
            of_runs = sees[:, q_start : q_start + stride * q_len : stride, k_start : k_start + stride * k_len : stride]
            by_tile = np.logical_or.reduceat(of_runs, range(0, q_len, BLOCK), 1)
            total += np.logical_or.reduceat(by_tile, range(0, k_len, BLOCK), 2).sum()
    return int(total)


@pytest.mark.pairs
@pytest.mark.parametrize("equal", [True, False], ids=["equal documents", "documents of many lengths"])
@pytest.mark.parametrize("mask", [causal(), full()], ids=["causal", "full"])
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_eight_packed_documents_visit_hardly_more_tiles_than_hold_a_visible_pair(
    layout: str, ranks: int, mask: Band, equal: bool
):
    plan, extents = RingPlan(layout, mask, ranks, TOKENS // ranks), packed(equal)
    sees = visible(plan.mask, range(TOKENS), range(TOKENS), extents)
    least = visits = 0
    small = lambda *_: (BLOCK, BLOCK)
    with patch.object(torch_tiles, "blockwise_tiles", small), patch.object(jax_tiles, "blockwise_tiles", small):
        for rank, shift in product(range(ranks), plan.shifts):
            mine, rows = np.ascontiguousarray(extents[:, plan.positions(rank)]), plan.rows(rank, shift)
            counted = visits_in_torch(mine, rows)
            assert counted == visits_in_jax(jnp.asarray(mine), jnp.asarray(rows, jnp.int32)), (rank, shift)
            visits += counted
            least += tiles_with_a_visible_pair(sees, plan, rank, shift)
    assert least <= visits <= 1.3 * least, visits / least


def test_at_the_real_tile_sizes_a_long_packed_batch_does_little_more_than_its_visible_area():
    """Allow more than 1.0 for the half of each tile on the diagonal, and for the tiles that two documents share."""
    tokens = 65536
    edges = np.linspace(0, tokens, DOCUMENTS + 1).astype(int) + np.array([0, *[37] * (DOCUMENTS - 1), 0])
    extents = np.stack([edges[:-1], edges[1:]], -1)[np.searchsorted(edges, np.arange(tokens), "right") - 1][None].astype(np.int32)
    plan = RingPlan("contiguous", causal(), 1, tokens)
    block_q, block_k = blockwise_tiles(1, tokens, tokens)
    area = sum(n * (n + 1) // 2 for n in np.diff(edges).tolist())
    assert visits_in_torch(extents, plan.rows(0, 0)) * block_q * block_k <= 1.3 * area
