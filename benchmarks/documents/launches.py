"""The launches of one rank on packed documents, without communication: each step computes on keys of random values."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ring_attn_core import causal
from ring_attn_core.plan.balanced import balanced_layout
from ring_attn_core.plan.needed import NeededPlan
from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.problem.options import Options
from ring_attn_torch.attend.state import State
from ring_attn_torch.call.decide import compile_call
from ring_attn_torch.call.prepare import Arrays, problem_of


class Sizes(NamedTuple):
    """The sizes of a rank's call. ``tokens``: those of a shard."""

    tokens: int
    heads: int
    kv_heads: int
    dim: int
    device: str


def drawn(length: int, rng: np.random.Generator) -> list[int]:
    """Return the lengths of log-normal documents that fill a sequence."""
    found: list[int] = []
    while (left := length - sum(found)) > 0:
        tokens = int(np.clip(rng.lognormal(np.log(1340), 1.3), 64, max(64, length // 4)))
        found.append(min(tokens, left))
    return found


def ranks_of(sizes: Sizes, layout: str, documents: list[int], ranks: int, skip: bool = False) -> list[Rank]:
    """Return all ranks of a ring. ``layout``: a name; "direct" is the balanced layout with the strategy "direct".

    ``skip``: leave out the steps in which a rank sees no key.
    """
    first = np.repeat(np.cumsum([0, *documents[:-1]]), documents)
    given: Any = balanced_layout(documents, ranks) if layout in ("balanced", "direct") else layout
    generator = torch.Generator(sizes.device).manual_seed(0)
    draw = lambda heads: torch.randn(1, sizes.tokens, heads, sizes.dim, device=sizes.device, generator=generator)
    heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads)
    tensors = [draw(each).to(torch.bfloat16 if sizes.device == "cuda" else torch.float32) for each in heads]
    options = Options(mask=causal(), layout=given, strategy="direct" if layout == "direct" else "ring")
    return [Rank(tensors, options, first, rank, ranks, skip) for rank in range(ranks)]


class Rank:
    """A rank's launches, and the visible pairs of its queries.

    ``tensors``: q, k, v and the cotangent of out. ``first``: the first visible key of each position.
    """

    def __init__(self, tensors: list[Tensor], options: Options, first: np.ndarray, rank: int, ranks: int, skip: bool) -> None:
        self.q, k, v, self.dout = tensors
        plan = RingPlan(options.layout, options.mask, ranks, k.shape[1])
        at = [np.asarray(plan.positions(each)) for each in range(ranks)]
        own, begin = at[rank], first[at[rank]]
        extents = torch.from_numpy(np.stack([begin, own + 1], -1)[None].astype(np.int32)).to(k.device)
        problem = problem_of(self.q, k, v, arrays := Arrays(extents=extents), ranks, options)
        decision = compile_call(problem, any_position=False)
        self.backends = decision.backend, decision.backward.backend
        keys, self.score = decision.pack_keys(k, v, arrays), decision.score_with(arrays)
        self.pairs = int((own - begin + 1).sum())
        sees = lambda keys: (np.searchsorted(keys, own, "right") > np.searchsorted(keys, begin)).any()
        shifts = [s for s in plan.shifts if not (skip and s) or sees(at[rank - s])]
        self.steps = [(keys, plan.rows(rank, s), s == shifts[-1]) for s in shifts]
        if isinstance(decision.steps, NeededPlan):
            tokens = decision.steps.capacity(rank)
            attended = keys._replace(kv=keys.kv.repeat(1, -(-tokens // k.shape[1]), 1, 1)[:, :tokens].contiguous())
            self.steps = [(attended, decision.steps.rows(rank, 0), True)]
        self.total, direct = self.forward(), isinstance(decision.steps, NeededPlan)
        self.arrived = None if direct else torch.zeros_like(keys.kv, dtype=torch.float32)
        self.works = {"forward": self.forward, "backward": self.backward}

    def forward(self) -> State:
        """Launch the forward of all steps."""
        total = None
        for keys, rows, last in self.steps:
            total = self.backends[0].attend(self.q, keys, rows, self.score, total, last)
        assert total is not None
        return total

    def backward(self) -> Any:
        """Launch the backward of all steps. Each but the first adds to the gradients ``arrived``, except under "direct"."""
        dtotal, dq, dkv = State(self.dout, torch.zeros_like(self.total.lse)), None, None
        of_q = self.backends[1].backward_inputs(self.q, *self.steps[0][:2], self.score, self.total, dtotal)
        for keys, rows, last in self.steps:
            before = None if dq is None else self.arrived
            dq, dkv = self.backends[1].attend_backward(of_q, keys, rows, self.score, dq, lambda x=before: x, last)
        return dq, dkv
