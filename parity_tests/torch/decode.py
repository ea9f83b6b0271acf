"""Runs a problem of parity_tests/support/decode.py on the PyTorch ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ring_attn_torch import tree_attention_decode
from ring_attn_torch.ring.groups import rank_in

from ..support.decode import Problem
from ..support.spawn import Ranks

Pair = tuple[np.ndarray, np.ndarray]


def tensors(problem: Problem, rank: int, device: str = "cpu") -> dict[str, Any]:
    """The arguments of one rank."""
    dtype = getattr(torch, problem.shape.dtype)
    in_cache = torch.float8_e4m3fn if "fp8" in problem.shape.features else dtype
    kinds = {"q": dtype, "k": in_cache, "v": in_cache}
    own = {name: x[rank] if name in ("k", "v", "k_positions") else x for name, x in problem.arrays.items()}
    made = {name: torch.from_numpy(np.ascontiguousarray(x)).to(device) for name, x in own.items()}
    return {name: x.to(kinds.get(name, x.dtype)) for name, x in made.items()} | problem.shape.options


def as_numpy(pair: Any) -> Pair:
    out, lse = (x.to(torch.promote_types(x.dtype, torch.float32)).cpu().numpy() for x in pair)
    return out, lse


def on_rank(group: Any, problems: Sequence[Problem], options: dict[str, Any] | None = None) -> list[Pair]:
    """Solve the problems in a process of the pool."""
    rank = rank_in(group)
    run = lambda problem: tree_attention_decode(**tensors(problem, rank), group=group, return_lse=True, **(options or {}))
    return [as_numpy(run(problem)) for problem in problems]


def run(pool: Ranks, problems: Sequence[Problem]) -> list[Pair]:
    """(out, lse) of problems of one number of ranks, which all ranks got alike, to the bit."""
    results = pool(problems[0].shape.ranks, on_rank, list(problems))
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            assert all(np.array_equal(x, y) for x, y in zip(mine, theirs, strict=True)), "ranks differ in a bit"
    return results[0]
