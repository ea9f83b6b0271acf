"""The record by which "auto" chooses in PyTorch: that of rank 0 on all ranks, exchanged once for each group."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from ring_attn_core.plan.machine import H200, Machine
from ring_attn_torch import ring_attention
from ring_attn_torch.call import autograd
from ring_attn_torch.ring import agreement, hardware

SLOW_HOST = replace(H200, host_forward=1.0, host_backward=1.0)
"""A machine on which every step takes a second, so that the strategy of one step wins."""


def attend(group: Any, records: list[Machine | ValueError | None], strategy: str = "auto") -> tuple[list[str], torch.Tensor]:
    """Return the strategies of two forwards and backwards, and dk. ``records``: the record that each rank finds."""
    rank, taken = dist.get_rank(group), []
    mine, checked, checked_backward = records[rank], autograd.checked, autograd.checked_backward

    def stored(framework: str, device: str) -> Machine | None:
        if isinstance(mine, ValueError):
            raise mine
        return mine

    def spy(check: Any) -> Any:
        def spied(problem: Any, *, anywhere: bool) -> Any:
            compiled = check(problem, anywhere=anywhere)
            taken.append(compiled.strategy)
            return compiled

        return spied

    with ExitStack() as patches:
        for place, name, value in (
            (hardware, "MEASURED", ("cpu",)),
            (hardware, "device_name", lambda: "a CPU"),
            (hardware, "stored", stored),
            (autograd, "checked", spy(checked)),
            (autograd, "checked_backward", spy(checked_backward)),
        ):
            patches.enter_context(patch.object(place, name, value))
        hardware._known.pop(group, None)
        torch.manual_seed(rank)
        q, k, v = (torch.randn(1, 6, 2, 8, requires_grad=True) for _ in range(3))
        for number in range(2):
            with ExitStack() as silent:
                if number:
                    silent.enter_context(patch.object(agreement, "_exchange", side_effect=AssertionError("asked")))
                ring_attention(q, k, v, group=group, strategy=strategy).sum().backward()  # type: ignore[arg-type]
        hardware._known.pop(group, None)
    assert k.grad is not None
    return taken, k.grad


def test_all_ranks_choose_by_the_record_of_rank_0_and_exchange_it_once(gloo):
    chosen = gloo(4, attend, [SLOW_HOST, None, H200, ValueError("a damaged record")])
    ring = gloo(4, attend, [SLOW_HOST] * 4, "ring")
    assert all(taken == ["gather"] * 4 for taken, _ in chosen)
    assert all(taken == ["ring"] * 4 for taken, _ in ring)
    for (_, dk), (_, expected) in zip(chosen, ring, strict=True):
        torch.testing.assert_close(dk, expected)


def test_without_a_record_of_rank_0_auto_is_the_ring(gloo):
    assert all(taken == ["ring"] * 4 for taken, _ in gloo(2, attend, [None, SLOW_HOST]))


def test_a_record_that_rank_0_cannot_read_is_refused_alike_on_every_rank(gloo):
    errors = gloo.outcomes(2, attend, [ValueError("it is damaged"), SLOW_HOST])
    assert [str(error) for error in errors] == ["rank 0: it is damaged"] * 2


def test_on_cpus_no_record_is_read(gloo):
    gloo(2, plain)


def plain(group: Any) -> None:
    with patch.object(hardware, "stored", side_effect=AssertionError("read")):
        ring_attention(*torch.randn(3, 1, 6, 2, 8), group=group, layout="contiguous")


def test_ranks_that_disagree_before_the_exchange_all_say_on_what(gloo):
    errors = gloo.outcomes(2, disagree)
    assert all(isinstance(error, ValueError) and "the ranks of this ring disagree on strategy" in str(error) for error in errors)


def disagree(group: Any) -> None:
    with patch.object(hardware, "MEASURED", ("cpu",)), patch.object(hardware, "device_name", lambda: "no such device"):
        hardware._known.pop(group, None)
        strategy = "two_way" if dist.get_rank(group) else "auto"
        ring_attention(*torch.randn(3, 1, 10, 2, 8), group=group, strategy=strategy)  # type: ignore[arg-type]
