"""The strategies of PyTorch: exact, the same bits at every run, and what they send, on gloo."""

# pyright: reportArgumentType=false

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ring_attn_core import Gather, Ulysses, full, sliding_window
from ring_attn_core.problem.traffic import Traffic, traffic
from ring_attn_torch import ring_attention
from ring_attn_torch.attend.blockwise import Blockwise
from ring_attn_torch.ring import collectives, transfer

from ..support.cases import Case
from ..support.selection import first, one_of_each
from ..support.spawn import PerRank
from ..support.strategies import BY_HEADS, EACH, SHARED, STRATEGIES, fitted, problem_of
from .ring import check_late_ranks, on_rank, options

TRAVELS = [
    *one_of_each(3, EACH),
    *SHARED,
    *BY_HEADS[:2],
    *(Case("contiguous", strategy=strategy, mask=full(), dtype="bfloat16") for strategy in STRATEGIES.values()),
    *(Case("contiguous", strategy=strategy, mask=sliding_window(3), ranks=8, heads=8) for strategy in STRATEGIES.values()),
    *(Case("contiguous", strategy=strategy, mask=sliding_window(0)) for strategy in STRATEGIES.values()),
    Case(order="global", extents="documents", key_mask="random", v_dim=7),
    Case("striped", ranks=2, order="global", key_extents="any", dtype="bfloat16"),
]


@pytest.mark.parametrize("case", TRAVELS, ids=str)
def test_messages_and_bytes_are_the_plans(gloo, case):
    counted = gloo(case.ranks, count, case, *(PerRank(*x) for x in case.inputs()))
    assert counted == [traffic(problem_of(case, "torch"), rank) for rank in range(case.ranks)]


def count(group: Any, case: Case, *shards: Any) -> tuple[Traffic, ...]:
    """The messages and bytes that this rank hands to torch.distributed in a forward and in a backward."""
    sent: list[Traffic] = []
    batch, gather, all_to_all = dist.batch_isend_irecv, collectives.all_gather_single, dist.all_to_all_single
    size = lambda x: x.numel() * x.element_size()

    def batched(operations: list[Any]) -> Any:
        sends = [x for x in operations if x.op is dist.isend]
        sent.append(Traffic(len({x.group_peer for x in sends}), sum(size(x.tensor) for x in sends)))
        return batch(operations)

    def gathered(out: torch.Tensor, x: torch.Tensor, group: Any, async_op: bool) -> Any:
        others = dist.get_world_size(group) - 1
        sent.append(Traffic(others, others * size(x)))
        return gather(out, x, group=group, async_op=async_op)

    def to_all(out: torch.Tensor, x: torch.Tensor, sizes: list[int], counts: list[int], *rest: Any, async_op: bool) -> Any:
        messages = sum(map(bool, counts)) if x.is_floating_point() else 0  # one message holds keys, their mask and extents
        sent.append(Traffic(messages, size(x)))
        return all_to_all(out, x, sizes, counts, *rest, async_op=async_op)

    total = lambda: sum(sent, Traffic(0, 0))
    replaced = {"batch_isend_irecv": batched, "all_to_all_single": to_all}
    with patch.multiple(dist, **replaced), patch.object(collectives, "all_gather_single", gathered):
        dtype, names = getattr(torch, case.dtype), [*case.features]
        q, k, v = (torch.from_numpy(x).to(dtype).requires_grad_() for x in shards[:3])
        v = None if case.values_in_keys else v
        features = dict(zip(names, map(torch.from_numpy, shards[5:]), strict=True))
        arguments = options(case.plan) | case.scalars | features | {"strategy": case.strategy, "order": case.order} | case.v_dims
        out, lse = ring_attention(q, k, v, group=group, **arguments, return_lse=True)
        forward = total()
        sent.clear()
        torch.autograd.backward((out, lse), (torch.ones_like(out), torch.ones_like(lse)))
    return forward, total()


@pytest.mark.parametrize("strategy", ["ring", *STRATEGIES.values()], ids=["ring", *STRATEGIES])
@pytest.mark.parametrize("delays", first([1, 3, 100], 1, 2, "campaign"))
def test_ranks_that_start_at_random_delays_give_the_same_bits(gloo, strategy, delays):
    check_late_ranks(gloo, fitted(Case(strategy=strategy, sinks=True, kv_heads=1)), delays)


def refused(group: Any, case: Case, *shards: Any) -> None:
    with patch.object(dist, "batch_isend_irecv", side_effect=AssertionError("sent")):
        on_rank(group, case, *shards)


def test_ranks_with_other_strategies_are_told_so(gloo):
    case = Case(ranks=2)
    cases = PerRank(replace(case, strategy="gather"), replace(case, strategy=Ulysses(ranks=2)))
    words = r"disagree on strategy: 'gather' on rank 0, 'Ulysses\(ranks=2\)' on rank 1"
    gloo.refuse(words, 2, refused, cases, *(PerRank(*x) for x in case.inputs()))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name", first(["direct", "in pairs", "two_way", "gather", "ulysses", "two_level"], 1, 2))
def test_a_compiled_call_takes_the_strategy(gloo, name):
    case = Case(strategy=STRATEGIES[name], ranks=2, sinks=True)
    inputs = [PerRank(*x) for x in case.inputs()]
    for compiled, eager in zip(gloo(2, under_compile, case, *inputs), gloo(2, on_rank, case, *inputs), strict=True):
        for a, b in zip(compiled, eager, strict=True):
            assert (a == b).all()


def under_compile(group: Any, case: Case, *shards: Any) -> Any:
    torch._dynamo.reset()
    compiled = torch.compile(ring_attention, backend="aot_eager", fullgraph=True)
    with patch("parity_tests.torch.ring.ring_attention", compiled):
        return on_rank(group, case, *shards)


def test_a_lost_rank_is_named_with_the_others_of_its_group():
    error = transfer.lost_error(RuntimeError("closed"), transfer._others([0, 1, 2], None), None)
    assert "rank 0 lost the ring while it waited for rank 1, rank 2, with which it exchanges arrays" in str(error)


def test_the_next_group_of_heads_travels_while_a_group_is_computed(gloo):
    """Each step comes after the gather of the next group has begun, and before it or the exchange of gradients is awaited."""
    forward, backward = gloo(2, events_of, Gather(groups=3))[0]
    assert " ".join(forward) == "begin done begin step done begin step done step"
    assert " ".join(backward) == "begin done begin step home done begin step returned home done step returned home returned"


def events_of(group: Any, strategy: Any) -> list[list[str]]:
    """Return what a forward and a backward do, in order: begin and wait for transfers, and compute."""
    events: list[str] = []

    class Seen(transfer.Transfer):
        def __init__(self, arriving: Any, sent: Any, awaited: Any, group: Any, start: Any) -> None:
            super().__init__(arriving, sent, awaited, group, start)
            self.home = bool(arriving) and arriving[0].dtype == torch.float32
            if self._works:
                events.append("home" if self.home else "begin")

        def wait(self) -> Any:
            events.append("returned" if self.home else "done")
            return super().wait()

    def step(function: Any) -> Any:
        return lambda *arguments, **keywords: (events.append("step"), function(*arguments, **keywords))[1]

    q, k, v = (torch.randn(1, 8, heads, 8, dtype=torch.bfloat16).requires_grad_() for heads in (6, 3, 3))
    with (
        patch.object(transfer, "Transfer", Seen),
        patch.multiple(Blockwise, attend=step(Blockwise.attend), attend_backward=step(Blockwise.attend_backward)),
    ):
        out = ring_attention(q, k, v, group=group, strategy=strategy)
        forward = events.copy()
        events.clear()
        out.sum().backward()
    return [forward, events]
