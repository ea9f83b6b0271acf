"""The reach of GPUs, by which "auto" chooses in PyTorch: exchanged with the first call of a problem, the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ring_attn_core.problem import auto
from ring_attn_core.problem.options import Options
from ring_attn_torch import ring_attention
from ring_attn_torch.call import autograd, decide, prepare
from ring_attn_torch.call.prepare import Arrays, problem_of
from ring_attn_torch.ring import agreement
from ring_attn_torch.ring.peer_access import Reach

from ..support.peers import mapped

GPUS = [f"gpu {rank}" for rank in range(4)]
ALL_REACHED = [Reach("a host", GPUS[rank], rank, GPUS) for rank in range(4)]
"""Four GPUs of a host that reach each other."""


@contextmanager
def as_on_gpus(group: Any, ranks: list[Reach]) -> Iterator[None]:
    """Let "auto" choose on CPUs as on GPUs with this reach, and call no shard short."""
    with ExitStack() as patches:
        patches.enter_context(patch.object(auto, "_is_measured", lambda problem: True))
        patches.enter_context(patch.object(auto, "SHORT", 0))
        patches.enter_context(patch.object(decide, "reach", lambda device: ranks[dist.get_rank(group)]))
        patches.enter_context(mapped())
        decisions = agreement.history_of(group).agreed, agreement.ALONE.agreed
        for clear in (prepare._problem.cache_clear, decide.compile_call.cache_clear, *(each.clear for each in decisions)):
            clear()
            patches.callback(clear)
        yield


def attend(group: Any, ranks: list[Reach], strategy: str = "auto") -> tuple[list[str], torch.Tensor]:
    """Return the strategies of two forwards and backwards, and dk. The second ones may exchange nothing."""
    taken: list[str] = []

    def spy(make: Any) -> Any:
        def spied(*call: Any, **how: Any) -> Any:
            decision = make(*call, **how)
            taken.append(decision.problem.strategy)
            return decision

        return spied

    torch.manual_seed(dist.get_rank(group))
    q, k, v = (torch.randn(1, 6, 2, 8, requires_grad=True) for _ in range(3))
    with as_on_gpus(group, ranks), ExitStack() as patches:
        for name in ("decide", "decide_backward"):
            patches.enter_context(patch.object(autograd, name, spy(getattr(autograd, name))))
        ring_attention(q, k, v, group=group, strategy=strategy).sum().backward()  # type: ignore[arg-type]
        patches.enter_context(patch.object(agreement, "_exchange", side_effect=AssertionError("asked")))
        ring_attention(q, k, v, group=group, strategy=strategy).sum().backward()  # type: ignore[arg-type]
    assert k.grad is not None
    return taken, k.grad


def test_all_ranks_take_push_if_every_gpu_reaches_the_others(gloo):
    chosen, ring = gloo(4, attend, ALL_REACHED), gloo(4, attend, ALL_REACHED, "ring")
    for (taken, dk), (_, expected) in zip(chosen, ring, strict=True):
        assert taken == ["push"] * 4
        torch.testing.assert_close(dk, expected)


@pytest.mark.parametrize(
    "changed",
    [
        ALL_REACHED[3]._replace(host="another"),
        ALL_REACHED[3]._replace(reached=GPUS[1:]),
        ALL_REACHED[3]._replace(cut_off=GPUS[:1]),
        ALL_REACHED[3]._replace(gpu=GPUS[0]),
        ALL_REACHED[3]._replace(index=0),
    ],
    ids=["host", "unseen", "access", "one GPU twice", "one number twice"],
)
def test_all_ranks_take_the_ring_if_one_gpu_has_no_reach(gloo, changed):
    assert [taken for taken, _ in gloo(4, attend, [*ALL_REACHED[:3], changed])] == [["ring"] * 4] * 4


def test_a_graph_in_capture_holds_no_push(gloo):
    assert gloo(2, captured) == [("push", "ring")] * 2


def captured(group: Any) -> tuple[str, str]:
    """Return what "auto" takes outside of a capture, and inside of one."""
    q = torch.randn(1, 6, 2, 8)
    ranks = [each._replace(reached=GPUS[:2]) for each in ALL_REACHED[:2]]
    with as_on_gpus(group, ranks):
        problem = problem_of(q, q, q, Arrays(), 2, Options())
        outside = decide.decide(problem, Arrays(), group, q.device)
        with patch.object(agreement, "capturing", lambda device: True):
            inside = decide.decide(problem, Arrays(), group, q.device)
    return outside.problem.strategy, inside.problem.strategy


def test_on_cpus_the_reach_is_not_exchanged(gloo):
    gloo(2, plain)


def plain(group: Any) -> None:
    with patch.object(decide, "reach", side_effect=AssertionError("asked")):
        ring_attention(*torch.randn(3, 1, 6, 2, 8), group=group, layout="contiguous")


def test_a_strategy_by_name_that_lacks_reach_is_refused_on_all_ranks(gloo):
    gloo.refuse("GPUs that reach each other.*rank 1 is on another host", 2, named)


def named(group: Any) -> None:
    ranks = [ALL_REACHED[0], ALL_REACHED[1]._replace(host="another")]
    with as_on_gpus(group, ranks), patch.object(decide, "COPYING", ("cpu",)):
        ring_attention(*torch.randn(3, 1, 6, 2, 8), group=group, strategy="push")


def test_ranks_that_disagree_before_the_exchange_all_say_on_what(gloo):
    gloo.refuse("the ranks of this ring disagree on strategy", 2, disagree)


def disagree(group: Any) -> None:
    with as_on_gpus(group, ALL_REACHED):
        strategy = "two_way" if dist.get_rank(group) else "auto"
        ring_attention(*torch.randn(3, 1, 10, 2, 8), group=group, strategy=strategy)  # type: ignore[arg-type]
