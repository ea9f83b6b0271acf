"""Recurrences and convolutions on a ring are those of one device, in every layout and dtype, and with packed documents."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import torch

from ring_attn_core.reference.tolerance import UNIT_ROUNDOFF

from ..support.recurrences import DOCUMENTS, SEQUENTIAL, Rows, call, ids_of, make, place, relative
from ..support.selection import first, grid, in_each

PLACES = [("zigzag", True), ("balanced", True), ("contiguous", False), ("zigzag", False), ("contiguous", True)]
"""Layouts, and whether the rows are packed documents."""
RANKS = [3, 1, 2, 4, 8]


def computed(package: str, rule: str, *arrays: Any, **where: Any) -> Any:
    return call(import_module(package), rule, arrays, **where)


def results(
    framework: Any, problem: Any, ranks: int, layout: str, rows: Rows = DOCUMENTS, dtype: str = "float64", documents: bool = True
) -> list[np.ndarray]:
    """Return the result of a problem, rounded to ``dtype``, on a ring, and its gradients, in natural order."""
    where, kind, length = place(layout, ranks, rows), getattr(torch, dtype), sum(rows[0])
    with framework.x64():
        whole = lambda x: framework.array(x.double().numpy(), str(x.dtype)[6:])
        placed = lambda x: framework.to_layout(whole(x), where, ranks)
        shards, rest = np.split(np.arange(len(problem.arrays)), [problem.sharded])
        arrays, given = problem.rounded(kind), {}
        if documents:
            extents = framework.document_extents(framework.array(ids_of(rows).numpy()))
            given = {"extents": framework.to_layout(extents, where, ranks)}
        function = partial(computed, f"ring_attn_{framework.name}", problem.rule, layout=where, length=length)
        both = [placed(arrays[i]) for i in shards], [whole(arrays[i]) for i in rest]
        cotangents = [placed(problem.cotangent(problem.shape).to(kind))]
        got, gradients = framework.over_ring(ranks, function, *both, cotangents, **given)
        natural = lambda x: np.asarray(framework.from_layout(framework.array(x), where, ranks, length))
        return [natural(x) if i <= problem.sharded else x for i, x in enumerate((*got, *gradients))]


def errors(
    framework: Any, ranks: int, rule: str, layout: str, documents: bool, rows: Rows = DOCUMENTS, dtype: str = "float64"
) -> Any:
    """Return the relative errors of the result and the gradients."""
    problem = make(rule, documents, rows)
    got = results(framework, problem, ranks, layout, rows, dtype, documents)
    return [relative(x, y) for x, y in zip(got, problem.reference(getattr(torch, dtype)), strict=True)]


@in_each(
    "rule,layout,documents,ranks",
    jax=grid(first(["kda", "mamba2", "gdn", "mamba1", "convolution"], 2), first(PLACES), first(RANKS)),
    torch=grid(SEQUENTIAL, first(PLACES, 2), first(RANKS)),
    slow="jax",
)
def test_a_ring_is_one_device(framework, rule, layout, documents, ranks):
    assert max(errors(framework, ranks, rule, layout, documents)) < 1e-13


@in_each("rule", jax=first(SEQUENTIAL, 0), torch=SEQUENTIAL)
def test_a_rank_without_tokens_takes_part_in_the_backward(framework, rule):
    """5 tokens over 4 ranks, the last without any; and 1 token, whose state no other run needs."""
    assert max(errors(framework, 4, rule, "contiguous", False, [[5], [5]])) < 1e-13
    assert max(errors(framework, 2, rule, "zigzag", False, [[1]])) < 1e-13


@in_each("rule", jax=first(SEQUENTIAL, 0), torch=SEQUENTIAL)
def test_a_document_changes_no_bit_of_another(framework, rule):
    """A changed token of row 0's third document changes that document alone."""
    problem, found = make(rule, True), []
    for change in (0, 1):
        problem.arrays[0][0, 20] += change
        found.append(results(framework, problem, 2, "zigzag")[0])
    differs = (found[0] != found[1]).reshape(*found[0].shape[:2], -1).any(-1)
    assert differs[0, 20] and not differs[0, :6].any() and not differs[0, 46:].any() and not differs[1].any()


@in_each(
    "rule,dtype,ranks",
    jax=first([(rule, dtype, 3) for rule in SEQUENTIAL for dtype in ("float32", "bfloat16")], 0),
    torch=grid(SEQUENTIAL, ["float32", "bfloat16"], first([3, 2])),
    slow="jax",
)
def test_a_ring_is_at_most_twice_as_wrong_as_one_device(framework, rule, dtype, ranks):
    alone, ring = (errors(framework, n, rule, "zigzag", True, dtype=dtype) for n in (1, ranks))
    assert all(found <= 2 * own + 2 * UNIT_ROUNDOFF[dtype] for own, found in zip(alone, ring, strict=True))
