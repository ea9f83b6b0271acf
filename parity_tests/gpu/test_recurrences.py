"""Recurrences over ranks that share one GPU: the rules of this library, and the kernels of flash-linear-attention."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ring_attn_torch

from ..support.recurrences import DOCUMENTS, LENGTH, SEQUENTIAL, Problem, call, ids_of, make, relative
from ..support.spawn import Ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
IDS = ids_of(DOCUMENTS)
BOUND = {torch.float32: 1e-5, torch.bfloat16: 4e-3}
BOUND_OF_FLA = {torch.float32: 2e-3, torch.bfloat16: 2e-2}
"""The kernels multiply in tf32 and bfloat16."""


@pytest.fixture(scope="module")
def gloo():
    pool = Ranks("gloo", 4)
    yield pool
    pool.close()


def errors(group: Any, problem: Problem, dtype: torch.dtype, documents: bool, backend: str | None = None) -> list[float]:
    """Return the relative errors of a rank's result and gradients, in zigzag; those of whole arrays are summed over the ranks."""
    ranks, rank = group.size(), group.rank()
    shard = lambda x: ring_attn_torch.to_layout(x, "zigzag", ranks).chunk(ranks, 1)[rank]
    place = lambda x, sharded=True: (shard(x) if sharded else x).cuda()
    leaves = [place(x, i < problem.sharded).requires_grad_() for i, x in enumerate(problem.rounded(dtype))]
    where = {"backend": backend} if backend else {}
    extents = place(ring_attn_torch.document_extents(IDS)) if documents else None
    out = call(ring_attn_torch, problem.rule, leaves, group=group, length=LENGTH, extents=extents, **where)
    gradients = torch.autograd.grad((out * place(problem.cotangent(problem.shape)).to(dtype)).sum(), leaves)
    found = []
    for i, (x, want) in enumerate(zip((out.detach(), *gradients), problem.reference(dtype), strict=True)):
        whole = i > problem.sharded
        if whole and ranks > 1:
            dist.all_reduce(x, group=group)
        found.append(relative(x.double().cpu(), want if whole else shard(torch.from_numpy(want)).numpy()))
    return found


def of_rules(group: Any, documents: bool, dtype: torch.dtype) -> dict[str, float]:
    return {rule: max(errors(group, make(rule, documents), dtype, documents)) for rule in SEQUENTIAL}


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("documents", [True, False], ids=["packed", "one"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_ring_computes_each_rule(gloo, ranks, documents, dtype):
    for found in gloo(ranks, of_rules, documents, dtype):
        assert {rule: error for rule, error in found.items() if not error < BOUND[dtype]} == {}


def of_fla(group: Any, rule: str, documents: bool, dtype: torch.dtype) -> float:
    generator, tokens, size = torch.Generator().manual_seed(3), IDS.shape, 64
    normal = lambda *shape: torch.randn(*tokens, *shape, generator=generator, dtype=torch.float64)
    q, k = normal(2, size), torch.nn.functional.normalize(normal(2, size), dim=-1)
    g = -normal(4, *([size] if rule == "kda" else [])).abs() / 10
    arrays = q, k, normal(4, size), g, normal(4).sigmoid()
    return max(errors(group, Problem(rule, arrays, 5, make(rule, documents).begins), dtype, documents, "fla"))


@pytest.mark.skipif(find_spec("fla") is None, reason="needs flash-linear-attention")
@pytest.mark.parametrize("dtype", BOUND_OF_FLA, ids=str)
@pytest.mark.parametrize(("rule", "documents"), [("gdn", True), ("gdn", False), ("kda", False)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_ring_computes_by_the_kernels_of_flash_linear_attention(gloo, ranks, rule, documents, dtype):
    for error in gloo(ranks, of_fla, rule, documents, dtype):
        assert error < BOUND_OF_FLA[dtype]
