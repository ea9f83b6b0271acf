"""The conversion of a balanced layout's shards to one run: both packages find the same local intervals."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from ring_attn_core import Band, RingPlan, causal, full, sliding_window
from ring_attn_core.plan.balanced import balanced_layout
from ring_attn_core.runs import Row
from ring_attn_jax.attend import keys as keys_jax
from ring_attn_jax.attend import one_run as in_jax
from ring_attn_jax.attend.score import Score as ScoreJax
from ring_attn_torch.attend import keys as keys_torch
from ring_attn_torch.attend import one_run as in_torch
from ring_attn_torch.attend.score import Score as ScoreTorch

from .support import features as draw
from .support.balanced import DOCUMENTS

LENGTH, LOCAL = sum(DOCUMENTS), 17


def converted(plan: RingPlan, rank: int, shift: int, extents: np.ndarray | None, key_extents: np.ndarray) -> list[np.ndarray]:
    """Return the row, extents and key extents of a step, equal in both packages."""
    rows, kv = plan.rows(rank, shift), np.zeros((2, LOCAL, 1, 2), np.float32)
    keys = keys_torch.Keys(torch.from_numpy(kv), extents=torch.from_numpy(key_extents))
    score = ScoreTorch(1.0, None, 0.0, None if extents is None else torch.from_numpy(extents))
    row, keys, score = in_torch.as_one_run(rows, keys, score, LOCAL, plan.band)
    assert keys.extents is not None and score.extents is not None
    found = [np.array(row), keys.extents.numpy(), score.extents.numpy()]
    of_jax = keys_jax.Keys(jnp.asarray(kv), extents=jnp.asarray(key_extents))
    jax_score = ScoreJax(1.0, None, 0.0, None if extents is None else jnp.asarray(extents))
    row, of_jax, jax_score = in_jax.as_one_run(jnp.asarray(rows, jnp.int32), of_jax, jax_score, LOCAL, plan.band)
    for mine, other in zip(found, (row, of_jax.extents, jax_score.extents), strict=True):
        np.testing.assert_array_equal(mine, other)
    return found


@pytest.mark.parametrize("documents", [True, False], ids=["documents", "no documents"])
@pytest.mark.parametrize("mask", [causal(), full(), sliding_window(9, 3), Band(2, None)], ids=str)
def test_local_intervals_hold_the_keys_that_positions_show(mask, documents):
    plan = RingPlan(balanced_layout(DOCUMENTS, 4, seq_local=LOCAL), mask, 4, LOCAL)
    rng = np.random.default_rng(0)
    whole = draw.extents("any", rng, 2, LENGTH, LENGTH).astype(np.int32)
    of_keys = draw.key_extents("tree", rng, 2, LENGTH, LENGTH).astype(np.int32)
    take = lambda x, at: np.concatenate([x, np.zeros((2, 4 * LOCAL - LENGTH, 2), np.int32)], 1)[:, at]
    for rank, shift in ((0, 0), (1, 2), (3, 3)):
        q_pos, k_pos = (np.array(plan.positions(each)) for each in (rank, (rank - shift) % 4))
        extents = take(whole, q_pos) if documents else None
        row, key_extents, local = converted(plan, rank, shift, extents, take(of_keys, k_pos))
        one = Row(*row[0, 0])
        assert (one.q_len, one.k_len) == ((q_pos < LENGTH).sum(), (k_pos < LENGTH).sum())
        lag, j = q_pos[:, None] - k_pos, np.arange(LOCAL)
        seen = np.ones(lag.shape, bool) if mask.lo is None else lag >= mask.lo
        seen = (seen if mask.hi is None else seen & (lag <= mask.hi)) & (k_pos < LENGTH)
        seen = np.broadcast_to(seen, (2, LOCAL, LOCAL))
        if extents is not None:
            seen = seen & (k_pos >= extents[..., :1]) & (k_pos < extents[..., 1:])
        inside = (j >= local[..., :1]) & (j < local[..., 1:]) & (j < one.k_len)
        np.testing.assert_array_equal(inside[:, : one.q_len], seen[:, : one.q_len])
        i, first, end = q_pos[None, None], *np.split(take(of_keys, k_pos), 2, -1)
        of_k = (j >= key_extents[..., :1]) & (j < key_extents[..., 1:])
        np.testing.assert_array_equal(of_k[..., : one.q_len], ((i >= first) & (i < end))[..., : one.q_len])
