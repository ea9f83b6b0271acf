"""Prefill under ``order="global"``: a chunk's tiles are those of the training forward over the whole sequence, to the bit.

The queries of a rank stand at their positions in an array of the whole sequence, with zeros elsewhere: the rows of a tile do not
depend on each other. The keys of the cache and of the chunk, of all ranks, stand at their positions too. The mask hides what is
not there. The tiles of the sequence that hold a query of this rank are computed as on one rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ring_attn_core.plan.global_order import GlobalPlan
from ring_attn_core.problem.options import Options

from ..attend.kernels import Kernels
from ..call.autograd import no_autocast
from ..call.decide import Decision, compile_call
from ..call.prepare import Arrays, problem_of
from ..ring.agreement import AgreedCall, agree_on
from ..ring.halo import all_gather
from ..ring.strategies.global_order import own_tiles
from .cache import KVCache
from .step import DecodeStep


def in_global_order(
    q: Tensor, new: tuple[Tensor, Tensor], cache: KVCache, layer: int, step: DecodeStep, arrays: Arrays, options: Options
) -> Tensor:
    """Return the attention of this rank's queries; ``options.length``: the tokens of the whole sequence. ``new``: k and v."""
    length: Any = options.length
    whole_q, whole_k, whole_v = (x.new_empty(()).expand(len(x), length, *x.shape[2:]) for x in (q, *new))
    problem = problem_of(whole_q, whole_k, whole_v, arrays, 1, options)
    alike = tuple((name, str(x)) for name, x in problem.fingerprint().items())
    agree_on(AgreedCall("prefill", q.device.type, alike), cache.ring, lambda: problem.check() and None)
    pick = lambda x: x if step.rows is None else x[step.rows]
    places, (k, v) = step.positions, new
    if not step.fresh:
        k, v, places = (
            torch.cat([pick(held), x], 1)
            for held, x in ((cache.k[layer], k), (cache.v[layer], v), (cache.positions, step.positions))
        )
    whole = [_place(q, step.positions, length)]
    whole += [_place(all_gather(x, cache.ring), all_gather(places, cache.ring), length) for x in (k, v)]
    with no_autocast(q.device.type):
        out = _attend(compile_call(problem, any_position=False), whole, arrays, step)
    rows = torch.arange(len(out), device=out.device)[:, None]
    return out[rows, step.positions.clamp(min=0).long()].masked_fill((step.positions < 0)[..., None, None], 0)


def _place(x: Tensor, positions: Tensor, length: int) -> Tensor:
    """Return x [b n h d] at its ``positions`` in an array [b length h d], 0 elsewhere. At -1 there is no token."""
    whole = x.new_zeros(len(x), length + 1, *x.shape[2:])
    rows = torch.arange(len(x), device=x.device)[:, None]
    whole[rows, torch.where(positions < 0, length, positions).long()] = x
    return whole[:, :length]


def _attend(decision: Decision, whole: list[Tensor], arrays: Arrays, step: DecodeStep) -> Tensor:
    """Return the attention of the whole sequence, true in the tiles of this rank's queries alone."""
    (q, k, v), plan, backend = whole, decision.steps, decision.backend
    places = np.unique(step.positions.cpu().numpy())
    places = places[places >= 0]
    if not places.size:
        return torch.zeros_like(v).repeat_interleave(q.shape[2] // v.shape[2], 2)
    assert isinstance(plan, GlobalPlan)
    own = np.zeros(plan.q_slot, bool)
    own[places] = True
    score = decision.score_with(arrays)._replace(own_queries=own)
    if isinstance(backend, Kernels):
        runs = plan.own_at(places.tolist())
        score = score._replace(query_tiles=own_tiles(runs, 0, plan.q_slot, q.device))
        backend = replace(backend, call=replace(backend.call, own=(runs.runs_and_tokens, None)))
    keys = decision.pack_keys(k, v, arrays)
    return backend.attend(q, keys, plan.rows(0, 0), score, None, last=True).out
