"""The record by which "auto" chooses in PyTorch: that of rank 0 on all ranks, exchanged once for each group."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ring_attn_core.plan.machine import H100, H200, Machine
from ring_attn_core.plan.measured import Hardware
from ring_attn_core.problem.options import Options
from ring_attn_torch import ring_attention
from ring_attn_torch.call import autograd
from ring_attn_torch.call.prepare import Arrays, problem_of
from ring_attn_torch.ring import agreement, hardware
from ring_attn_torch.ring.reach import Reach

from ..support.peers import mapped

SLOW_HOST = replace(H200, host_forward=1.0, host_backward=1.0)
"""A machine on which every step takes a second, so that the strategy of one step wins."""

SLOW_NCCL = replace(H100, host_send=1.0, host_pull_forward=1.0, host_pull_backward=1.0)
"""A machine on which the host starts a transfer of NCCL or "pull" in a second, so that "push" wins."""

GPUS = [f"gpu {rank}" for rank in range(4)]
ALL_REACHED = [Reach("a host", GPUS[rank], rank, GPUS) for rank in range(4)]
"""Four GPUs of a host that reach each other."""


def attend(
    group: Any, records: list[Machine | ValueError | None], strategy: str = "auto", reaches: list[Reach] | None = None
) -> tuple[list[str], torch.Tensor]:
    """Return the strategies of two forwards and backwards, and dk.

    ``records``: the record that each rank finds. ``reaches``: the reach of each rank's GPU; None: of no GPU.
    """
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
            (hardware, "device_name", lambda device: "a CPU"),
            (hardware, "stored", stored),
            (autograd, "checked", spy(checked)),
            (autograd, "checked_backward", spy(checked_backward)),
        ):
            patches.enter_context(patch.object(place, name, value))
        if reaches is not None:
            patches.enter_context(patch.object(hardware, "reach", lambda device: reaches[rank]))
            patches.enter_context(mapped())
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


def test_all_ranks_take_push_if_its_copies_were_measured_and_every_gpu_reaches_the_others(gloo):
    chosen = gloo(4, attend, [SLOW_NCCL] * 4, "auto", ALL_REACHED)
    ring = gloo(4, attend, [SLOW_NCCL] * 4, "ring")
    assert all(taken == ["push"] * 4 for taken, _ in chosen)
    for (_, dk), (_, expected) in zip(chosen, ring, strict=True):
        torch.testing.assert_close(dk, expected)


@pytest.mark.parametrize(
    ("machine", "changed"),
    [
        (replace(SLOW_NCCL, peer=0.0), ALL_REACHED[3]),
        (SLOW_NCCL, ALL_REACHED[3]._replace(host="another")),
        (SLOW_NCCL, ALL_REACHED[3]._replace(reached=GPUS[1:])),
        (SLOW_NCCL, ALL_REACHED[3]._replace(cut_off=GPUS[:1])),
        (SLOW_NCCL, ALL_REACHED[3]._replace(gpu=GPUS[0])),
        (SLOW_NCCL, ALL_REACHED[3]._replace(index=0)),
        (SLOW_NCCL, None),
    ],
    ids=["old record", "host", "unseen", "access", "one GPU twice", "one number twice", "no GPU"],
)
def test_all_ranks_leave_push_out_if_one_of_them_cannot_run_it(gloo, machine, changed):
    reaches = None if changed is None else [*ALL_REACHED[:3], changed]
    chosen = [taken for taken, _ in gloo(4, attend, [machine] * 4, "auto", reaches)]
    assert chosen == [chosen[0]] * 4
    assert not {"push", "pull"} & {*chosen[0]}


def test_a_graph_in_capture_holds_neither_pull_nor_push(gloo):
    assert gloo(2, captured) == [("push", False)] * 2


def captured(group: Any) -> tuple[str, bool]:
    """Return what "auto" takes outside of a capture, and whether it takes "pull" or "push" inside of one."""
    q = torch.randn(1, 6, 2, 8)
    with patch.object(hardware, "MEASURED", ("cpu",)), patch.dict(hardware._known, {group: Hardware(SLOW_NCCL, 2, True)}):
        problem = problem_of(q, q, q, Arrays(), 2, Options())
        outside = hardware.on_hardware(problem, q.device, group)
        with patch.multiple(torch.cuda, is_initialized=lambda: True, is_current_stream_capturing=lambda: True):
            inside = hardware.on_hardware(problem, q.device, group)
    return str(outside.travel), inside.travel in ("pull", "push")


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
    with patch.object(hardware, "MEASURED", ("cpu",)), patch.object(hardware, "device_name", lambda device: "no such device"):
        hardware._known.pop(group, None)
        strategy = "two_way" if dist.get_rank(group) else "auto"
        ring_attention(*torch.randn(3, 1, 10, 2, 8), group=group, strategy=strategy)  # type: ignore[arg-type]
