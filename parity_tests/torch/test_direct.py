"""The strategy "direct" of PyTorch where slices are parts of shards: exact, and the bytes that a window costs."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ring_attn_core import LAYOUTS
from ring_attn_core.problem.traffic import Traffic, traffic
from ring_attn_torch.ring import transfer

from ..support.selection import first
from ..support.spawn import PerRank
from ..support.strategies import SLICED, of_a_window, problem_of
from .ring import check_late_ranks
from .test_strategies import count


@pytest.mark.parametrize("delays", first([2, 3, 100], 1, 2, "campaign"))
def test_delays_between_slices_change_no_bit(gloo, delays):
    check_late_ranks(gloo, SLICED[0], delays)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_window_of_1024_at_8192_tokens_a_rank_costs_what_the_plan_says(gloo, layout):
    case = of_a_window(layout, 1024, 8192) if layout != "striped" else of_a_window(layout, 32, 256)
    counted = gloo(case.ranks, count, case, *(PerRank(*x) for x in case.inputs()))
    assert counted == [traffic(problem_of(case, "torch"), rank) for rank in range(case.ranks)]
    number = 4 * (case.head_dim + case.v_dim)  # bytes of a key and its value, or of their gradients
    forward = [counts[0] for counts in counted]
    if layout == "contiguous":
        assert forward == [*[Traffic(1, 1024 * number)] * 3, Traffic(0, 0)]
    if layout == "zigzag":
        assert forward == [Traffic(1, 1024 * number), *[Traffic(2, 2 * 1024 * number)] * 2, Traffic(1, 1024 * number)]
    if layout == "striped":
        assert min(of.bytes for of in forward) >= 3 * 255 * number


def test_a_group_is_connected_by_one_collective_of_all_ranks():
    class Group:
        pass

    group = Group()
    with patch.object(dist, "all_reduce") as collective:
        for device in ("cpu", "meta", "meta"):
            transfer.connect(group, torch.device(device))  # type: ignore[arg-type]
    assert collective.call_count == 1
