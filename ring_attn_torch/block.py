"""Attention of one block, and the exact merge of blocks: the building blocks of a ring, for use in other algorithms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ring_attn_core.keywords import named_keywords
from ring_attn_core.masks import causal
from ring_attn_core.problem.checks import FARTHEST, check_extents, check_key_extents, check_pairs, check_runs, rate_of
from ring_attn_core.problem.options import Options
from ring_attn_core.runs import Band, Run, row

from .attend.backend import Backend
from .attend.dropout import Dropout, dropout_state
from .attend.keys import Keys
from .attend.score import Score
from .attend.state import State
from .attend.tiles import Rows
from .call.autograd import (
    OPTIONAL,
    OpCall,
    as_op,
    as_outputs,
    fake_outputs,
    from_outputs,
    refuse_second_derivative,
    save_inputs,
    saved_of,
    separate_gradients,
)
from .call.decide import compile_call
from .call.prepare import Arrays, check_tensors, differentiates, problem_of, refuse_transforms, values_of

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


@named_keywords
def attend_block(
    q: Float[Tensor, "batch queries heads head_dim"],
    k: Float[Tensor, "batch keys kv_heads head_dim"],
    v: Float[Tensor, "batch keys kv_heads v_dim"] | None = None,
    *,
    v_dim: int | None = None,
    mask: Band = causal(),
    q_run: Run | None = None,
    k_run: Run | None = None,
    extents: Int[Tensor, "batch queries 2"] | None = None,
    key_extents: Int[Tensor, "batch keys 2"] | None = None,
    key_mask: Bool[Tensor, "batch keys"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Float[Tensor, " heads"] | None = None,
    dropout_rate: float | None = None,
    dropout_seed: int | Int[Tensor, ""] | None = None,
    dropout_offset: tuple[int | Tensor, int | Tensor] = (0, 0),
    backend: str = "auto",
) -> tuple[Float[Tensor, "batch queries heads v_dim"], Float[Tensor, "batch queries heads"]]:
    """Compute attention of a block of queries over a block of keys, both anywhere in a longer sequence.

    Return (out, lse) with ``out_i = sum_j exp(s_ij - lse_i) v_j`` and ``lse_i = log sum_j exp(s_ij)``. Here s_ij is the score of
    query i and key j, and j runs over the keys of the block that query i may see. Both results are float32 (float64 for float64
    inputs) and differentiable. A query that sees no key has out 0 and lse -inf. :func:`merge` merges the pairs of several blocks.

    ``q_run``, ``k_run``: the global positions of the query tokens and of the key tokens, each a ``Run(start, length, stride)``.
    The strides must be equal. Tokens of the block beyond a run's length are padding. None: all tokens of the block, from position
    0 on. Calls with another start or length need no recompilation.

    The other arguments are those of ``ring_attention``, with arrays of the block's tokens; the backends "flash", "flash4" and
    "cudnn" are refused. To apply a sink, merge the pair (out 0, lse ``sink``) into the merged result once, not once per block.

    Raise ValueError if inputs do not fit. Differentiable once, in reverse mode.
    """
    rate = rate_of(dropout_rate, dropout_seed)
    if v is None or v_dim is not None:
        v, v_dim = values_of(k, v, v_dim)
    v_dim = v_dim if backend == "auto" or not differentiates((q, k)) else None
    numbers: dict[str, Any] = {"scale": scale, "softcap": softcap, "dropout_rate": rate, "v_dim": v_dim}
    options = Options(layout="contiguous", mask=mask, backend=backend, **numbers)
    arrays = Arrays(extents, key_mask, None, alibi_slopes, None, key_extents)
    refuse_transforms((q, k, v, arrays.sinks, arrays.alibi_slopes))
    check_tensors(q, k, v, arrays)
    q_run, k_run = check_runs(q_run, k_run, tuple(q.shape), tuple(k.shape))
    if rate and dropout_seed is not None:
        arrays = arrays._replace(dropout_seed=dropout_state(Dropout(dropout_seed, dropout_offset), q.device))
    out, lse, _ = block_state(q, k, v, arrays, options, (q_run, k_run))
    return out, lse


def block_state(q: Tensor, k: Tensor, v: Tensor, arrays: Arrays, options: Options, runs: tuple[Run, Run]) -> State:
    q_run, k_run = runs
    counts = [q_run.start, q_run.length, k_run.start, k_run.length, q_run.stride, *options.counts]
    return from_outputs(torch.ops.ring_attn.attend_block(q, k, v, counts, OpCall(options).text, *arrays))


def merge(
    a: tuple[Tensor, Tensor] | Sequence[tuple[Tensor, Tensor]], b: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Merge two pairs (out [b s h e], lse [b s h]) over disjoint key sets A and B into the pair over all keys.

    ``merge([a, b, c])`` merges a list of pairs in order. The results are differentiable.

    The merge is exact, since with ``Z_A = sum_A exp(s_j) = exp(lse_A)`` and ``Z = Z_A + Z_B``

        lse = log(Z_A + Z_B) = log(exp(lse_A) + exp(lse_B))
        out = sum_(A and B) exp(s_j) v_j / Z = (Z_A out_A + Z_B out_B) / Z
            = exp(lse_A - lse) out_A + exp(lse_B - lse) out_B

    A query that sees no key of A, with out 0 and lse -inf, keeps its pair over B. A float32 lse has a rounding error of up to
    ``2^-24 |lse|``. This error alone changes out by up to ``2^-24 |lse| |out_A - out_B|``. If lse is 1e4, this bound is
    ``6e-4 |out_A - out_B|``. The merge adds its own rounding. For float32 and float64 inputs, :func:`ring_attention` carries the
    rounding error of lse from step to step, except with vendors' backends. Raise ValueError if an argument is not a pair (out,
    lse), or if the shapes do not fit.
    """
    pairs = check_pairs(a, b, lambda x: isinstance(x, Tensor), "a torch.Tensor")
    top = reduce(torch.maximum, [lse for _, lse in pairs]).detach()
    top = top.masked_fill(top == -math.inf, 0)
    weights = [torch.exp(lse - top) for _, lse in pairs]
    z = reduce(torch.add, weights)
    nothing = z == 0
    z = z.masked_fill(nothing, 1)
    out = reduce(torch.add, [(weight / z)[..., None] * out for weight, (out, _) in zip(weights, pairs, strict=True)])
    return out, (top + z.log()).masked_fill(nothing, -math.inf)


@as_op(f"attend_block(Tensor q, Tensor k, Tensor v, SymInt[] counts, str call, {OPTIONAL}) -> (Tensor, Tensor, Tensor)")
def _forward(
    q: Tensor, k: Tensor, v: Tensor, counts: Sequence[int], call: str, *arrays: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    keys, rows, score, backend = _block(q, k, v, Arrays(*arrays), counts, call)
    with torch.autocast(q.device.type, enabled=False):
        return as_outputs(backend.attend(q, keys, rows, score, None, last=False))


@torch.library.register_fake("ring_attn::attend_block")
def _(q, k, v, *_):  # type: ignore[no-untyped-def]
    out, lse, rest = fake_outputs(q, v)
    return out.to(lse.dtype), lse, rest


@as_op(
    f"attend_block_backward(Tensor[] cotangents, Tensor[] saved, SymInt[] counts, str call, {OPTIONAL}) "
    "-> (Tensor, Tensor, Tensor)"
)
def _backward(
    cotangents: Sequence[Tensor], saved: Sequence[Tensor], counts: Sequence[int], call: str, *arrays: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    (dout, dlse, *_), (q, k, v, *total) = cotangents, saved
    keys, rows, score, backend = _block(q, k, v, Arrays(*arrays), counts, call, backward=True)
    with torch.autocast(q.device.type, enabled=False):
        query = backend.backward_inputs(q, keys, rows, score, State(*total), State(dout, dlse))
        dq, dkv = backend.attend_backward(query, keys, rows, score, None, lambda: None, last=True)
    return dq.to(q.dtype), *separate_gradients(dkv, k, v)


@torch.library.register_fake("ring_attn::attend_block_backward")
def _(cotangents, saved, *_):  # type: ignore[no-untyped-def]
    q, k, v, *_ = saved
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _differentiate(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
    saved, arrays = saved_of(ctx)
    dq, dk, dv = torch.ops.ring_attn.attend_block_backward(cotangents[:2], saved, ctx.counts, ctx.call, *arrays)
    return dq, dk, dv, None, None, *Arrays()


torch.library.register_autograd("ring_attn::attend_block", _differentiate, setup_context=save_inputs)
torch.library.register_autograd("ring_attn::attend_block_backward", refuse_second_derivative)


def _block(
    q: Tensor, k: Tensor, v: Tensor, arrays: Arrays, counts: Sequence[int], call: str, backward: bool = False
) -> tuple[Keys, Rows, Score, Backend]:
    """Check a block. Return what its backend's methods take after q, and the backend. ``counts``: start and length of both runs,
    the stride, then ``Options.counts``."""
    (q_start, q_length, k_start, k_length, stride), options = counts[:5], OpCall.read(call, tuple(counts[5:])).options
    problem = problem_of(q, k, v, arrays, 1, options)
    decision = compile_call(problem, any_position=True)
    decision = decision.backward if backward else decision
    q_row, k_row = (0, q_length, q_start, stride), (0, k_length, k_start, stride)
    look = problem.device == "cpu" and not backward
    if look and arrays.extents is not None:
        check_extents(arrays.extents.long(), [q_row], FARTHEST)
    if look and arrays.key_extents is not None:
        check_key_extents(arrays.key_extents.long(), [k_row], FARTHEST)
    rows = ((row(q_row, k_row, options.mask, q.shape[1], k.shape[1]),),)
    return decision.pack_keys(k, v, arrays), rows, decision.score_with(arrays), decision.backend
