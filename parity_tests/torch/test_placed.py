"""A shard whose tokens cannot lie where its extents place them is refused by RingTransformer on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ring_attn_core import causal, full
from ring_attn_torch import RingTransformer, shard_batch
from ring_attn_torch.ring.groups import Group, rank_in, ranks_of


def without_layout(group: Group, odd: int | None, kind: str) -> None:
    """Call a model on this rank's shard of a balanced layout, on rank ``odd`` (None: on all ranks) without the layout."""
    ranks, rank = ranks_of(group), rank_in(group)
    given: dict[str, Any] = (
        {"documents": torch.arange(32)[None] // 8 * 8} if kind == "documents" else {"tree": ([-1, 0, 0], [8, 14, 10])}
    )
    shard = shard_batch(torch.arange(32)[None], "balanced", ranks, rank, **given)
    model = RingTransformer(vocab=99, dim=16, depth=1, heads=4, group=group)
    arrays: dict[str, Any] = {"extents": shard.extents, "key_extents": shard.key_extents, "longest_path": shard.longest_path}
    with torch.no_grad():
        model(shard.ids, shard.positions, shard.length, **arrays, layout=None if odd in (None, rank) else shard.layout)


@pytest.mark.parametrize("kind", ["documents", "tree"])
def test_a_model_without_the_layout_of_its_shard_is_every_ranks_error(gloo, kind):
    outcomes = gloo.outcomes(4, without_layout, None, kind)
    assert len({*map(str, outcomes)}) == 1 and isinstance(outcomes[0], ValueError)
    assert "layout=shard.layout" in str(outcomes[0])
    assert gloo.outcomes(4, without_layout, 9, kind) == [None] * 4


def test_an_extent_that_begins_after_its_query_is_every_ranks_error_under_a_causal_mask(gloo):
    assert gloo.outcomes(2, extents_after, 8, full()) == [None, None]
    assert gloo.outcomes(2, extents_after, 6, causal()) == [None, None]  # the query is padding
    for outcome in gloo.outcomes(2, extents_after, 8, causal()):
        assert isinstance(outcome, ValueError)
        assert str(outcome).startswith(
            "rank 1: the extent of row 0, position 6 is [7, 8], so the query sees no key under a causal"
        )


def extents_after(group: Group, length: int, mask: Any) -> None:
    extents = torch.tensor([0, 6]).repeat(1, 4, 1)
    extents[:, 2] = torch.tensor([7, 8]) if rank_in(group) else extents[:, 2]
    model = RingTransformer(vocab=9, dim=16, depth=1, heads=4, layout="contiguous", group=group, mask=mask)
    model(torch.zeros(1, 4, dtype=torch.long), length=length, extents=extents)
