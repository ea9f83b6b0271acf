"""A shard whose tokens cannot lie where its extents place them is refused by RingTransformer on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ring_attn_core import causal, full
from ring_attn_torch import RingTransformer, document_extents, gather, ring_attention, shard_batch, to_layout
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
    gloo.refuse("layout=shard.layout", 4, without_layout, None, kind)
    gloo(4, without_layout, 9, kind)


def test_an_extent_that_begins_after_its_query_is_every_ranks_error_under_a_causal_mask(gloo):
    gloo(2, extents_after, 8, full())
    gloo(2, extents_after, 6, causal())  # the query is padding
    words = r"^rank 1: the extent of row 0, position 6 is \[7, 8\], so the query sees no key under a causal"
    gloo.refuse(words, 2, extents_after, 8, causal())


def extents_after(group: Group, length: int, mask: Any) -> None:
    extents = torch.tensor([0, 6]).repeat(1, 4, 1)
    extents[:, 2] = torch.tensor([7, 8]) if rank_in(group) else extents[:, 2]
    model = RingTransformer(vocab=9, dim=16, depth=1, heads=4, layout="contiguous", group=group, mask=mask)
    model(torch.zeros(1, 4, dtype=torch.long), length=length, extents=extents)


def test_another_length_or_order_or_a_tree_without_key_extents_is_every_ranks_error_at_once(gloo):
    """Each rank makes each mistake, and then the right call."""
    outcomes = gloo(4, every_mistake)
    assert outcomes == [outcomes[0]] * 4
    for found, expected in zip(
        outcomes[0],
        (
            "the ranks of this ring disagree on length: 38 on rank 0, 37 on ranks 1, 2, 3",
            "extents lie in natural order, and not in the order of the tokens",
            "extents lie in natural order, and not in the order of the tokens",
            "rank 0: this balanced layout was made for prefix trees, and without key_extents",
        ),
        strict=True,
    ):
        assert found.startswith(expected)


def every_mistake(group: Group) -> list[str]:
    ranks, rank = ranks_of(group), rank_in(group)
    ids, documents = torch.arange(37)[None], torch.arange(40)[None] // 7
    model = RingTransformer(vocab=99, dim=16, depth=1, heads=2, group=group)
    four = shard_batch(ids, "zigzag", ranks, rank)
    tree = shard_batch(ids[:, :32], "balanced", ranks, rank, tree=([-1, 0, 0], [8, 14, 10]))
    extents = document_extents(documents).chunk(ranks, 1)[rank].contiguous()
    of = lambda shard, **how: ring_attention(*[torch.ones(1, shard.ids.shape[1], 2, 8)] * 3, group=group, **how)
    found = []
    for call in (
        lambda: of(four, length=37 + (rank == 0)),
        lambda: of(four, extents=extents),
        lambda: of(four, extents=extents, mask=full()),
        lambda: of(tree, layout=tree.layout),
    ):
        with pytest.raises(ValueError) as error:  # noqa: PT011  # the messages are compared
            call()
        found.append(str(error.value))
    model(four.ids, four.positions, four.length)
    of(tree, layout=tree.layout, key_extents=tree.key_extents)
    return found


def test_a_plain_length_may_fit_fewer_ranks(gloo):
    """A batch of 32 tokens in a bucket of 64: on 2 of the 4 ranks its shards would be full."""
    gloo(4, in_a_bucket)


def in_a_bucket(group: Group) -> None:
    found = []
    for bucket in (32, 64):
        x = torch.zeros(1, bucket, 2, 8, dtype=torch.float64)
        x[:, :32] = torch.randn(1, 32, 2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        x = to_layout(x, "zigzag", 4).chunk(4, 1)[rank_in(group)].clone().requires_grad_()
        ring_attention(x, x, x, group=group, length=32).sin().sum().backward()
        found.append(gather(x.grad, group=group, length=bucket)[:, :32])  # type: ignore[arg-type]
    torch.testing.assert_close(*found)
