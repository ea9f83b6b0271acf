"""The ring as ops of torch.library, with autograd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ring_attn_core.problem.checks import check_extents

from .arguments import ARRAYS, checked, problem_of
from .attend.keys import pack
from .attend.state import Gradients
from .ring import loop
from .ring.agreement import agree, agreed
from .ring.groups import group_of, rank_in
from .ring.step import Ring


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
    dropout_offset: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    group = group_of(group_name)
    arrays = extents, key_mask, sinks, alibi_slopes, draw
    numbers = scale, softcap, dropout_rate, backend, dropout_offset
    problem = problem_of(q, k, v, arrays, group, layout, lo, hi, length, kv_length, *numbers)
    try:
        plan, score, backend_ = checked(problem)
        look = extents is not None and (problem.device == "cpu" or not agreed(problem, group))
        if extents is not None and look:
            check_extents(extents.long(), plan.q_runs[rank_in(group)], plan.kv_length)
    except Exception as error:
        agree(problem, group, error)
        raise
    agree(problem, group, again=look)
    score = replace(score, extents=extents, sinks=sinks, slopes=alibi_slopes, draw=draw)
    with torch.autocast(problem.device, enabled=False):  # the state stays in float32, whatever surrounds the call
        keys = pack(k, v, key_mask, apart=backend_.apart and not plan.hops)
        return loop.forward(q, keys, score, Ring(plan, group), backend_)


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
    dropout_offset: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    group = group_of(group_name)
    arrays = extents, key_mask, sinks, alibi_slopes, draw
    numbers = scale, softcap, dropout_rate, backend, dropout_offset
    problem = problem_of(q, k, v, arrays, group, layout, lo, hi, length, kv_length, *numbers)
    plan, score, backend_ = checked(problem)
    score = replace(score, extents=extents, sinks=sinks, slopes=alibi_slopes, draw=draw)
    with torch.autocast(q.device.type, enabled=False):
        keys = pack(k, v, key_mask, apart=backend_.apart and not plan.hops)
        dq, dkv, dsinks = loop.backward(q, keys, (out, lse), (dout, dlse), score, Ring(plan, group), backend_)
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
