"""Tests of ``check_every_call``: it notices ranks that make different calls, all seen before, as repeated calls do not."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ring_attn_core import causal, full
from ring_attn_torch import check_every_call, ring_attention
from ring_attn_torch.ring import agreement


def call(group, tokens=4, mask=causal(), scale=0.75):
    x = torch.ones(1, tokens, 2, 8)
    return tuple(ring_attention(x, x, x, group=group, mask=mask, scale=scale).shape)


def after_all_were_seen(group, differ, check):
    """Every rank runs every problem; then rank 1 makes another call than the others."""
    call(group), call(group, mask=full()), call(group, tokens=6)
    with check_every_call(group) if check else nullcontext():
        call(group)
        return differ(group, dist.get_rank())


def another_mask(group, rank):
    return call(group, mask=full() if rank == 1 else causal())


def other_sizes(group, rank):
    return call(group, tokens=6 if rank == 1 else 4)


def one_call_less(group, rank):
    return [call(group) for _ in range(3 - (rank == 1))]


DIFFERENT = {
    another_mask: "disagree on mask: .* on rank 0, .* on rank 1. Pass the same on every rank$",
    other_sizes: r"disagree on q_shape: \[1, 4, 2, 8\] on rank 0, \[1, 6, 2, 8\] on rank 1",
    one_call_less: "at different calls: ring_attention on rank 0, the end of check_every_call on rank 1",
}


@pytest.mark.parametrize("differ", DIFFERENT)
def test_inside_it_all_ranks_raise_the_same(gloo, differ):
    gloo.refuse(DIFFERENT[differ], 2, after_all_were_seen, differ, True)


def test_outside_it_another_mask_passes_unnoticed(gloo):
    assert gloo(2, after_all_were_seen, another_mask, False) == [(1, 4, 2, 8)] * 2


def test_it_ends_with_its_block_and_asks_no_rank_afterwards(gloo):
    gloo(2, inside_and_outside)


def inside_and_outside(group):
    for _ in range(2):
        with check_every_call(group):
            call(group)
    with pytest.raises(ValueError, match="on already"), check_every_call(group), check_every_call(group):
        pass
    with patch.object(agreement, "_exchange", side_effect=AssertionError("asked")):
        call(group)


def test_a_ring_of_one_asks_no_other_rank():
    with check_every_call():
        assert call(None) == (1, 4, 2, 8)
