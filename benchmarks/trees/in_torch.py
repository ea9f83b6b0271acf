"""Attention of a tree over all GPUs, and of its rollouts one by one: over the same ring, or shared out among the GPUs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn_core.data.balanced_trees import balanced_tree_layout
from ring_attn_torch import causal, ring_attention, to_layout, tree_extents

from ..support.turns import Work, take_turns


class Problem(NamedTuple):
    """The tree and its heads. ``strategies``: those of the tree."""

    prompt: int
    completions: int
    length: int
    heads: int
    kv_heads: int
    dim: int
    rounds: int
    strategies: list[str]
    dtype: str = "bfloat16"


def run(problem: Problem, device: torch.device) -> dict[str, list[float]]:
    """Return the seconds of forward and backward of each candidate, for all rollouts; the slowest rank's."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    children, rollout = problem.completions, problem.prompt + problem.length
    parents, lengths = [-1] + children * [0], [problem.prompt] + children * [problem.length]
    layout = balanced_tree_layout(parents, lengths, ranks)
    shard = to_layout(tree_extents(parents, lengths).key_extents, layout, ranks).chunk(ranks, 1)[rank].to(device)
    alone: Any = [dist.new_group([each]) for each in range(ranks)][rank]
    attend = partial(ring_attention, mask=causal())
    works, times = {}, {}
    for name in problem.strategies:
        works[f"tree, {name}"] = partial(attend, layout=layout, strategy=name, key_extents=shard), shard.shape[1]
    works["one by one"], times["one by one"] = (attend, rollout // ranks), children
    works["one by one, shared out"], times["one by one, shared out"] = (
        (partial(attend, group=alone), rollout),
        -(-children // ranks),
    )
    passes = {name: _passes(work, tokens, problem, device) for name, (work, tokens) in works.items()}

    def slowest(seconds: float) -> float:
        longest = torch.tensor(seconds, device=device, dtype=torch.float32)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return longest.item()

    found = [take_turns({name: both[i] for name, both in passes.items()}, problem.rounds, slowest=slowest) for i in range(2)]
    return {name: [each[name] * times.get(name, 1) for each in found] for name in works}


def _passes(attend: Callable[..., Tensor], tokens: int, problem: Problem, device: torch.device) -> tuple[Work, Work]:
    make = lambda heads: torch.randn(1, tokens, heads, problem.dim, device=device).to(getattr(torch, problem.dtype))
    *leaves, dout = (make(heads) for heads in (problem.heads, problem.kv_heads, problem.kv_heads, problem.heads))
    plain = [x.clone() for x in leaves]
    out = attend(*(x.requires_grad_() for x in leaves))
    return lambda: attend(*plain), lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
