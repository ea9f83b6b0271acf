"""The choice of "auto" in a balanced layout of PyTorch: "direct" where the extents of all ranks stay within its documents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ring_attn_core.plan.balanced import balanced_layout
from ring_attn_core.problem.traffic import traffic
from ring_attn_torch import ring_attention
from ring_attn_torch.call import decide
from ring_attn_torch.ring import agreement

from ..support.balanced import AUTO_CASES
from ..support.cases import check
from ..support.spawn import PerRank
from ..support.strategies import problem_of
from .ring import run
from .test_strategies import count


def forget(group: dist.ProcessGroup) -> None:
    """Forget the calls and the extents of other tests on this group."""
    record = agreement.history_of(group)
    record.agreed.clear()
    record.read.clear()


@pytest.mark.parametrize("case", AUTO_CASES, ids=str)
def test_auto_is_exact_and_sends_the_bytes_of_direct(gloo, case):
    gloo(case.ranks, forget)
    check(case, run(gloo, case))
    sent = [traffic(problem_of(replace(case, strategy="direct"), "torch"), rank) for rank in range(case.ranks)]
    assert gloo(case.ranks, count, case, *(PerRank(*x) for x in case.inputs())) == sent


LAYOUT: Any = balanced_layout((20, 12, 24, 8), 4)
WITHIN, BEYOND = 0, 1


def results_of(group: dist.ProcessGroup, calls: list[tuple[str, int]]) -> list[list[np.ndarray]]:
    """Return (out, dq, dk, dv) of each call, a strategy and extents; the backwards run after all forwards.

    The extents are the documents of ``LAYOUT``; with ``BEYOND`` one query of rank 3 also sees all tokens before its document.
    """
    forget(group)
    generator = torch.Generator().manual_seed(group.rank())
    q, k, v, dout = (torch.randn(1, 16, 2, 8, generator=generator) for _ in range(4))
    ran = []
    for strategy, reach in calls:
        inputs, extents = [x.clone().requires_grad_() for x in (q, k, v)], own_extents(group)
        extents[0, 15, 0] *= 0 if reach and group.rank() == 3 else 1
        ran.append((ring_attention(*inputs, group=group, layout=LAYOUT, extents=extents, strategy=strategy), inputs))
    return [[x.detach().numpy() for x in (out, *torch.autograd.grad(out, inputs, dout))] for out, inputs in ran]


def own_extents(group: dist.ProcessGroup) -> torch.Tensor:
    """Return the document of each query of a rank, int32 [1, 16, 2]."""
    ends = torch.tensor(LAYOUT.documents[0]).cumsum(0)
    at = torch.searchsorted(ends, torch.tensor(LAYOUT.positions(group.rank())), right=True)
    return torch.stack([(ends - torch.tensor(LAYOUT.documents[0]))[at], ends[at]], -1)[None].int()


def test_extents_beyond_the_documents_take_the_ring_in_calls_and_in_backwards_to_come(gloo):
    calls = [("auto", WITHIN), ("auto", BEYOND), ("auto", WITHIN)]
    named = [("direct", WITHIN), ("ring", WITHIN), ("ring", BEYOND)]
    for found, (direct, ring, beyond) in zip(gloo(4, results_of, calls), gloo(4, results_of, named), strict=True):
        check_bits(found[0][:1], direct[:1])
        for x, y in zip(found[0], ring, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
        check_bits(found[1], beyond)
        check_bits(found[2], ring)


def test_extents_within_the_documents_take_direct_in_every_call(gloo):
    results = gloo(4, results_of, [("auto", WITHIN), ("auto", WITHIN), ("direct", WITHIN), ("ring", WITHIN)])
    for first, second, direct, _ in results:
        check_bits(first, direct)
        check_bits(second, direct)
    assert any((x != y).any() for *_, direct, ring in results for x, y in zip(direct, ring, strict=True))


def check_bits(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y)


def looks(group: dist.ProcessGroup) -> list[int]:
    """Return how many exchanges the ranks have made after each of some calls, by the rule of GPUs."""
    forget(group)
    x, extents, counts = torch.ones(1, 16, 1, 8), own_extents(group), []

    def call(extents: torch.Tensor) -> None:
        ring_attention(x, x, x, group=group, layout=LAYOUT, extents=extents)
        counts.append(exchanges.call_count)

    with patch.object(decide, "EACH_TIME", ()), patch.object(decide, "exchange", wraps=agreement.exchange) as exchanges:
        for each in (extents, extents, extents.clone()):
            call(each)
        call(extents.mul_(1))  # other values, for all that a rank knows without reading them
        for _ in range(2):
            with torch.inference_mode():
                call(extents.clone())
        extents[..., 0] = 0
        call(extents)
        call(extents.clone())
    return counts


def test_each_tensor_of_extents_is_read_once_on_gpus_until_one_reaches_beyond(gloo):
    """Inference tensors are not read after the first call that brings some."""
    assert gloo(4, looks) == [[1, 1, 2, 3, 4, 4, 5, 5]] * 4


def refusal(group: dist.ProcessGroup) -> str:
    forget(group)
    x, extents = torch.ones(1, 16, 1, 8), own_extents(group)
    extents[0, 3, 0] = -1 if group.rank() == 1 else 0
    try:
        ring_attention(x, x, x, group=group, layout=LAYOUT, extents=extents)
    except ValueError as error:
        return str(error)
    return "no error"


def test_invalid_extents_of_one_rank_are_refused_on_all(gloo):
    refused = gloo(4, refusal)
    assert len(set(refused)) == 1 and "extents" in refused[0], refused
