"""Steps of a ring in torch.profiler: a range for each, forward and backward, and none without a profiler."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch.profiler import ProfilerActivity, profile

from ring_attn_torch import Gather, ring_attention
from ring_attn_torch.ring import loop


def names_of(group: Any, strategy: Any) -> list[str]:
    """Return the names of the ranges of a forward and a backward of this rank, in the order of their beginnings."""
    q, k, v = (torch.randn(1, 8, 2, 8).requires_grad_() for _ in range(3))
    call = lambda: ring_attention(q, k, v, group=group, strategy=strategy).sum().backward()
    with patch.object(loop, "step_name", side_effect=AssertionError("a name without a profiler")):
        call()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        call()
    events = sorted(profiled.events() or (), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.startswith("ring step")]


def test_each_step_is_a_range_while_a_profiler_runs(gloo):
    for rank, names in enumerate(gloo(4, names_of, "ring")):
        steps = ["ring step 1 of 4, own keys"]
        steps += [f"ring step {shift + 1} of 4, 1 KiB from rank {(rank - shift) % 4}" for shift in range(1, 4)]
        assert names == steps + [f"{step} backward" for step in steps]


def test_steps_of_two_ways_are_named_in_the_order_of_their_turns(gloo):
    names = gloo(4, names_of, "two_way")[0]
    assert [name.rpartition(" ")[2] for name in names[1:4]] == ["3", "1", "2"]


def test_the_step_of_gathered_keys_counts_all_ranks(gloo):
    assert gloo(2, names_of, "gather")[0] == [f"ring step 1 of 1, 2 KiB of 2 ranks{suffix}" for suffix in ("", " backward")]


def test_each_group_of_heads_is_a_step(gloo):
    steps = [f"ring step {number} of 2, 1 KiB of 2 ranks" for number in (1, 2)]
    assert gloo(2, names_of, Gather(groups=2))[0] == steps + [f"{step} backward" for step in steps]
