"""The public call: checks, the plan, and a torch.library custom op with autograd round the ring."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.kernels.backends import select
from ring_attn_core.kernels.problem import Problem, refuse_later
from ring_attn_core.masks import causal
from ring_attn_core.plan import RingPlan
from ring_attn_core.runs import Band

from . import ring
from .agreement import agree, refuse
from .attend import Score, pack
from .comm import Group, ranks_of
from .groups import check_inputs, group_name, group_of, refuse_forward_mode

if TYPE_CHECKING:
    from jaxtyping import Float


def ring_attention(
    q: Float[Tensor, "batch seq_local heads head_dim"],
    k: Float[Tensor, "batch kv_local kv_heads head_dim"],
    v: Float[Tensor, "batch kv_local kv_heads v_dim"],
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    layout: str = "zigzag",
    mask: Band = causal(),
    extents: Any = None,
    key_mask: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    alibi_slopes: Any = None,
    dropout_rate: float = 0.0,
    dropout_seed: Any = None,
    dropout_offset: tuple[Any, Any] = (0, 0),
    length: int | None = None,
    kv_length: int | None = None,
    strategy: str = "auto",
    backend: str = "auto",
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """Exact attention of this rank's queries over the keys of every rank of the ring, forward and backward.

    ``out_i = sum_j exp(s_ij - lse_i) v_j``, ``s_ij = scale q_i . k_j`` for the keys j that ``mask`` lets query i see, ``lse_i =
    log sum_j exp(s_ij)``: the softmax is computed blockwise with (out, lse) carried from step to step in float32 (Liu et al.,
    "Ring Attention with Blockwise Transformers", arXiv:2310.01889; the online softmax is algorithm 1 of FlashAttention-2,
    arXiv:2307.08691).

    Arguments (arrays are this rank's shards, in layout order; positions and lengths count tokens of the whole sequence):
        q: ``[batch, seq_local, heads, head_dim]``, bfloat16, float16, float32 or float64.
        k: ``[batch, kv_local, kv_heads, head_dim]``; kv_heads divides heads, query head h reads key head ``h // (heads /
            kv_heads)``.
        v: ``[batch, kv_local, kv_heads, v_dim]``.
        group: the ring: a ProcessGroup or a 1-D DeviceMesh; None is the default group, or a ring of one without
            torch.distributed.
        layout: "contiguous", "striped" or "zigzag": which tokens a rank holds; to_layout and from_layout go there and back.
        mask: ``causal()``, ``full()`` or ``sliding_window(before, after)``, in global positions.
        scale: what q . k is multiplied by; None is ``head_dim ** -0.5``.
        length, kv_length: true global numbers of queries and keys; what the shards hold beyond is padding, never seen, out 0.
            None: all that the shards hold (kv_length: ``length`` where q and k shards are equally long).
        backend: "auto" or "blockwise". strategy: "auto" or "ring". deterministic: gradients repeat to the bit (blockwise:
            always).
        return_lse: also return lse.
        extents, key_mask, softcap, sinks, alibi_slopes, dropout_*: of a later version, NotImplementedError.

    Returns ``out [batch, seq_local, heads, v_dim]`` in q's dtype, and with ``return_lse`` also ``lse [batch, seq_local,
    heads]`` in float32, natural log, differentiable. A query that sees nothing: out 0, lse -inf, zero gradients.

    Raises ValueError, the same on every rank and before anything is sent, for inputs that do not fit, and for ones that the ranks
    disagree on where any of them is new to its rank; RuntimeError after the group's timeout where a rank does not come. No second
    derivative and no forward mode. An op of torch.library, so it works under torch.compile(fullgraph=True) and selective
    checkpointing (``torch.ops.ring_attn.forward.default`` is the op to save); autocast leaves it alone.
    """
    name = group_name(group)
    try:
        refuse_later(
            strategy,
            extents=extents,
            key_mask=key_mask,
            softcap=softcap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            dropout_rate=dropout_rate,
            dropout_seed=dropout_seed,
            dropout_offset=dropout_offset,
        )
        refuse_forward_mode(q, k, v)
        check_inputs(q, k, v, name, mask, layout=layout, length=length, kv_length=kv_length, scale=scale, backend=backend)
    except (ValueError, NotImplementedError) as error:
        refuse(error, group_of(name), q.device.type if isinstance(q, Tensor) else "cpu")
    out, lse = torch.ops.ring_attn.forward(q, k, v, name, layout, mask.lo, mask.hi, length, kv_length, scale, backend)
    return (out, lse) if return_lse else out


@torch.library.custom_op("ring_attn::forward", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group_name: str,
    layout: str,
    lo: int | None,
    hi: int | None,
    length: int | None,
    kv_length: int | None,
    scale: float | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    group = group_of(group_name)
    problem = _problem(q, k, v, group, layout, lo, hi, length, kv_length, scale, backend)
    try:
        plan, score = _checked(problem)
    except ValueError as error:
        agree(problem, group, error)
        raise
    agree(problem, group)
    with torch.autocast(problem.device, enabled=False):  # the state stays in float32, whatever surrounds the call
        return ring.forward(q, pack(k, v), plan, group, score)


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
    group_name: str,
    layout: str,
    lo: int | None,
    hi: int | None,
    length: int | None,
    kv_length: int | None,
    scale: float | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    group = group_of(group_name)
    plan, score = _checked(_problem(q, k, v, group, layout, lo, hi, length, kv_length, scale, backend))
    with torch.autocast(q.device.type, enabled=False):
        dq, dkv = ring.backward(q, pack(k, v), out, lse, dout, dlse, plan, group, score)
    return dq.to(q.dtype), dkv.to(k.dtype)


@_backward.register_fake
def _(dout, dlse, q, k, v, *arguments):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), k.new_empty((*k.shape[:3], k.shape[3] + v.shape[3]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.arguments = inputs
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Any, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    dq, dkv = torch.ops.ring_attn.backward(dout, dlse, q, k, v, out, lse, *ctx.arguments)
    dk, dv = dkv.split([k.shape[-1], v.shape[-1]], -1)
    return dq, dk, dv, *[None] * len(ctx.arguments)


def _refuse_twice(ctx: Any, *gradients: Any) -> None:
    raise RuntimeError("ring_attention has no second derivative: call backward or torch.autograd.grad without create_graph=True")


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_refuse_twice)


def _problem(
    q: Tensor, k: Tensor, v: Tensor, group: Group, layout: str, lo: int | None, hi: int | None, *arguments: Any
) -> Problem:
    name = lambda x: str(x.dtype).removeprefix("torch.")
    dtypes = name(q), name(k), name(v)
    return Problem(q.shape, k.shape, v.shape, dtypes, q.device.type, ranks_of(group), layout, Band(lo, hi), *arguments)


@lru_cache(maxsize=1024)
def _checked(problem: Problem) -> tuple[RingPlan, Score]:
    """The plan and score of a problem, checked once for every problem that this process meets."""
    plan = problem.check()
    scale = problem.q_shape[-1] ** -0.5 if problem.scale is None else problem.scale
    return plan, Score(scale, select(problem, problem.backend))
