"""The public call: checks, the plan, and a torch.library custom op with autograd round the ring."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.kernels.backends import VENDORS, check_vendor, runnable
from ring_attn_core.kernels.problem import Given, Problem, check_extents, check_strategy
from ring_attn_core.masks import causal
from ring_attn_core.plan import RingPlan
from ring_attn_core.runs import Band

from . import ring
from .agreement import agree, agreed, refuse
from .comm import Group, rank_in, ranks_of
from .groups import check_inputs, group_name, group_of, refuse_transforms
from .keys import apart, pack
from .launch import capability
from .score import Gradients, Score, draw_of

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int


def ring_attention(
    q: Float[Tensor, "batch seq_local heads head_dim"],
    k: Float[Tensor, "batch kv_local kv_heads head_dim"],
    v: Float[Tensor, "batch kv_local kv_heads v_dim"],
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    layout: str = "zigzag",
    mask: Band = causal(),
    extents: Int[Tensor, "batch seq_local 2"] | None = None,
    key_mask: Bool[Tensor, "batch kv_local"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
    alibi_slopes: Float[Tensor, " heads"] | None = None,
    dropout_rate: float = 0.0,
    dropout_seed: int | Int[Tensor, ""] | None = None,
    dropout_offset: tuple[int | Tensor, int | Tensor] = (0, 0),
    length: int | None = None,
    kv_length: int | None = None,
    strategy: str = "auto",
    backend: str = "auto",
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """Exact attention of this rank's queries over the keys of every rank of the ring, forward and backward.

        s_ij  = scale q_i . k_j                                     for the keys j that query i may see
        lse_i = log sum_j exp(s_ij)
        out_i = sum_j exp(s_ij - lse_i) v_j

    Query i may see key j where ``mask``, ``extents`` and ``key_mask`` all let it. The softmax is computed blockwise with (out,
    lse) carried from step to step in float32 (Liu et al., "Ring Attention with Blockwise Transformers", arXiv:2310.01889; the
    online softmax is algorithm 1 of FlashAttention-2, arXiv:2307.08691).

    Arguments (arrays are this rank's shards, in layout order; positions and lengths count tokens of the whole sequence):
        q: ``[batch, seq_local, heads, head_dim]``, bfloat16, float16, float32 or float64.
        k: ``[batch, kv_local, kv_heads, head_dim]``; kv_heads divides heads, query head h reads key head ``h // (heads /
            kv_heads)``.
        v: ``[batch, kv_local, kv_heads, v_dim]``.
        group: the ring: a ProcessGroup or a 1-D DeviceMesh; None is the default group, or a ring of one without
            torch.distributed.
        layout: "contiguous", "striped" or "zigzag": which tokens a rank holds; to_layout and from_layout go there and back.
        mask: ``causal()``, ``full()`` or ``sliding_window(before, after)``, in global positions.
        extents: integers ``[batch, seq_local, 2]``, sharded like q: first and end (exclusive) of the global *key* positions that
            each query may see: ``document_extents``, ``prefix_extents``. Values outside the keys and reversed ones are refused at
            every call on a CPU, and on a GPU, where looking is a wait, at the first call of a problem; later they are cut.
        key_mask: bool ``[batch, kv_local]``, sharded like k, True where a key may be attended; any pattern.
        scale: what q . k is multiplied by; None is ``head_dim ** -0.5``.
        softcap: scores become ``softcap tanh(s_ij / softcap)`` (Gemma 2, arXiv:2408.00118, section 2).
        sinks: ``[heads]`` logits in the softmax's denominator, ``lse_i = log(exp(sink_h) + sum_j exp(s_ij))``; differentiable.
        alibi_slopes: ``[heads]``, constants; adds ``slope_h (k_pos - q_pos)`` in global positions after softcap (ALiBi,
            arXiv:2108.12409, section 3).
        dropout_rate: share of the probabilities that is dropped, 0 to below 1, rounded to a multiple of 2^-16; the others are
            scaled by ``1 / (1 - rate)``. Which ones depends on (seed, batch row, head, q_pos, k_pos) only, all global: for any
            ranks and layout, and in JAX, the same.
        dropout_seed: an int or a 0-d integer array, the same on every rank and another at every step.
        dropout_offset: the global index of the first batch row and of the first head, where these are sharded too.
        length, kv_length: true global numbers of queries and keys; what the shards hold beyond is padding, never seen, out 0.
            None: all that the shards hold (kv_length: ``length`` where q and k shards are equally long).
        backend: "auto": the first that can, of "hopper" (its GPUs), "triton" (NVIDIA GPUs) and "blockwise" (everywhere);
            "triton_tf32" multiplies float32 in tf32. Or, to compare with, "flash" and "cudnn", FlashAttention-2 and cuDNN as
            PyTorch carries them, and "flash4", FlashAttention-4 where that is installed, as exact as they are; no windows,
            extents, key_mask, softcap, ALiBi, dropout. strategy: "auto" or "ring". deterministic: gradients repeat to the bit,
            as all but those three always do.
        return_lse: also return lse.

    Returns ``out [batch, seq_local, heads, v_dim]`` in q's dtype, and with ``return_lse`` also ``lse [batch, seq_local,
    heads]`` in float32, natural log, differentiable. A query that sees nothing: out 0, lse -inf (or its sink), zero gradients.

    Raises ValueError, the same on every rank and before anything is sent, for inputs that do not fit, and for ones that the ranks
    disagree on, where none of them has seen its own before; RuntimeError after the group's timeout where a rank does not come, or
    makes another call than those that repeat one. No second derivative, no forward mode, no torch.func.grad. An op of
    torch.library, so it works under torch.compile(fullgraph=True) and selective checkpointing (the op to save is
    ``torch.ops.ring_attn.forward.default``); autocast leaves it alone.
    """
    name = group_name(group)
    try:
        check_strategy(strategy)
        arrays = {"extents": extents, "key_mask": key_mask, "sinks": sinks, "alibi_slopes": alibi_slopes}
        numbers = {"scale": scale, "softcap": softcap, "dropout_rate": dropout_rate}
        refuse_transforms(q, k, v, sinks, alibi_slopes)
        check_inputs(q, k, v, name, mask, arrays, layout=layout, length=length, kv_length=kv_length, backend=backend, **numbers)
        differentiates = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        check_vendor(backend, deterministic, return_lse and differentiates)
        draw = draw_of(dropout_seed, dropout_offset, q.device) if dropout_rate and dropout_seed is not None else None
    except Exception as error:
        refuse(error, group_of(name), q.device.type if isinstance(q, Tensor) else "cpu")
    out, lse = torch.ops.ring_attn.forward(
        q, k, v, *arrays.values(), draw, name, layout, mask.lo, mask.hi, length, kv_length, *numbers.values(), backend
    )
    return (out, lse) if return_lse else out


@torch.library.custom_op("ring_attn::forward", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    extents: Tensor | None,
    key_mask: Tensor | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    draw: Tensor | None,
    group_name: str,
    layout: str,
    lo: int | None,
    hi: int | None,
    length: int | None,
    kv_length: int | None,
    scale: float | None,
    softcap: float | None,
    dropout_rate: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    group = group_of(group_name)
    arrays = extents, key_mask, sinks, alibi_slopes, draw
    problem = problem_of(q, k, v, arrays, group, layout, lo, hi, length, kv_length, scale, softcap, dropout_rate, backend)
    try:
        plan, score = checked(problem)
        look = extents is not None and (problem.device == "cpu" or not agreed(problem, group))
        if extents is not None and look:
            check_extents(extents.long(), plan.q_runs[rank_in(group)], plan.kv_length)
    except Exception as error:
        agree(problem, group, error)
        raise
    agree(problem, group, again=look)
    score = replace(score, extents=extents, sinks=sinks, slopes=alibi_slopes, draw=draw)
    with torch.autocast(problem.device, enabled=False):  # the state stays in float32, whatever surrounds the call
        return ring.forward(q, pack(k, v, key_mask, apart(plan, score)), plan, group, score)


@_forward.register_fake
def _(q, k, v, *arguments):  # type: ignore[no-untyped-def]
    b, s, h, _ = q.shape
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((b, s, h, v.shape[-1])), q.new_empty((b, s, h), dtype=lse_dtype)


@torch.library.custom_op("ring_attn::backward", mutates_args=())
def _backward(
    dout: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    extents: Tensor | None,
    key_mask: Tensor | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    draw: Tensor | None,
    group_name: str,
    layout: str,
    lo: int | None,
    hi: int | None,
    length: int | None,
    kv_length: int | None,
    scale: float | None,
    softcap: float | None,
    dropout_rate: float,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    group = group_of(group_name)
    arrays = extents, key_mask, sinks, alibi_slopes, draw
    problem = problem_of(q, k, v, arrays, group, layout, lo, hi, length, kv_length, scale, softcap, dropout_rate, backend)
    plan, score = checked(problem)
    score = replace(score, extents=extents, sinks=sinks, slopes=alibi_slopes, draw=draw)
    with torch.autocast(q.device.type, enabled=False):
        keys = pack(k, v, key_mask, apart(plan, score))
        dq, dkv, dsinks = ring.backward(q, keys, out, lse, dout, dlse, plan, group, score)
    dk, dv = gradients_apart(dkv, k, v)
    dsinks = q.new_empty(0) if dsinks is None else dsinks.to(sinks.dtype)  # type: ignore[union-attr]
    return dq.to(q.dtype), dk, dv, dsinks


@_backward.register_fake
def _(dout, dlse, q, k, v, out, lse, extents, key_mask, sinks, *arguments):  # type: ignore[no-untyped-def]
    dsinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def gradients_apart(dkv: Gradients, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """dk and dv in k's dtype, contiguous and of separate memory, as an op's outputs must be."""
    if isinstance(dkv, tuple):
        dk, dv = dkv
        return dk.to(k.dtype), dv.to(v.dtype)
    dk, dv = dkv.split([k.shape[-1], v.shape[-1]], -1)
    return k.new_empty(k.shape).copy_(dk), v.new_empty(v.shape).copy_(dv)


ARRAYS = "extents", "key_mask", "sinks", "alibi_slopes", "draw"
"""The optional arrays of the ops, in their order."""


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v = inputs[:3]
    arrays, ctx.arguments = inputs[3 : 3 + len(ARRAYS)], inputs[3 + len(ARRAYS) :]
    ctx.save_for_backward(q, k, v, *output, *arrays)


def _differentiate(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Any, ...]:
    q, k, v, out, lse, *arrays = ctx.saved_tensors
    dq, dk, dv, dsinks = torch.ops.ring_attn.backward(dout, dlse, q, k, v, out, lse, *arrays, *ctx.arguments)
    of_arrays = [dsinks if name == "sinks" and array is not None else None for name, array in zip(ARRAYS, arrays, strict=True)]
    return dq, dk, dv, *of_arrays, *[None] * len(ctx.arguments)


def refuse_second_derivative(ctx: Any, *gradients: Any) -> None:
    raise RuntimeError("ring_attention has no second derivative: call backward or torch.autograd.grad without create_graph=True")


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(refuse_second_derivative)


def problem_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arrays: tuple[Tensor | None, ...],
    group: Group,
    layout: str,
    lo: int | None,
    hi: int | None,
    length: int | None,
    kv_length: int | None,
    scale: float | None,
    softcap: float | None,
    dropout_rate: float,
    backend: str,
) -> Problem:
    name = lambda x: str(x.dtype).removeprefix("torch.")
    *optional, draw = arrays
    given = [Given(label, tuple(x.shape), name(x)) for label, x in zip(ARRAYS, optional, strict=False) if x is not None]
    given += [] if draw is None else [Given("dropout_seed", (), "int64")]
    return Problem(
        tuple(q.shape),
        tuple(k.shape),
        tuple(v.shape),
        (name(q), name(k), name(v)),
        q.device.type,
        ranks_of(group),
        layout,
        Band(lo, hi),
        length,
        kv_length,
        scale,
        softcap,
        dropout_rate,
        tuple(given),
        backend,
        capability(q.device),
        "torch",
    )


@lru_cache(maxsize=1024)
def checked(problem: Problem, anywhere: bool = False) -> tuple[RingPlan, Score]:
    """The plan and score of a problem, checked, and its kernels compiled, once for every problem that this process meets.

    ``anywhere``: it is a block that may stand wherever it is told to, not where the plan has it.
    """
    plan = problem.check()
    scale = problem.q_shape[-1] ** -0.5 if problem.scale is None else problem.scale
    call = runnable(problem, anywhere)
    vendor = problem.backend if problem.backend in VENDORS else None
    return plan, Score(scale, problem.softcap, problem.dropout_rate, call, vendor, problem.blanks or anywhere)
