"""The public call: checks, the plan, and a custom_vjp round the ring."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ring_attn_core.kernels.backends import select
from ring_attn_core.kernels.problem import Problem, refuse_later
from ring_attn_core.masks import causal
from ring_attn_core.plan import RingPlan
from ring_attn_core.runs import Band

from . import ring
from .attend import Score, pack
from .varying import dtype_names, ring_size, vary_alike

if TYPE_CHECKING:
    from jaxtyping import Array, Float

OUT_NAME = "ring_attn_out"
LSE_NAME = "ring_attn_lse"


def ring_attention(
    q: Float[Array, "batch seq_local heads head_dim"],
    k: Float[Array, "batch kv_local kv_heads head_dim"],
    v: Float[Array, "batch kv_local kv_heads v_dim"],
    *,
    axis_name: str = "seq",
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
        axis_name: the mesh axis of the ring; call inside ``jax.shard_map`` over it, or use ``sharded_ring_attention``.
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

    Raises ValueError at trace time for inputs that do not fit, and what to do about it. No second derivative. out and lse carry
    the checkpoint names "ring_attn_out" and "ring_attn_lse": save them under jax.checkpoint and the forward ring runs once.
    """
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
    dtypes, ranks, device = dtype_names(q, k, v), ring_size(axis_name), jax.default_backend()
    problem = Problem(q.shape, k.shape, v.shape, dtypes, device, ranks, layout, mask, length, kv_length, scale, backend)
    plan = problem.check()
    score = Score(q.shape[-1] ** -0.5 if scale is None else float(scale), select(problem, backend))
    out, lse = _attention(*vary_alike(axis_name, q, k, v), plan, axis_name, score)  # type: ignore[misc]
    return (out, lse) if return_lse else out


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _attention(q: jax.Array, k: jax.Array, v: jax.Array, plan: RingPlan, axis: str, score: Score) -> tuple[jax.Array, jax.Array]:
    return ring.forward(q, pack(k, v), plan, axis, score)


def _forward(q, k, v, plan, axis, score):  # type: ignore[no-untyped-def]
    out, lse = ring.forward(q, pack(k, v), plan, axis, score)
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    return (out, lse), (q, k, v, out, lse)


def _backward(plan, axis, score, residuals, cotangents):  # type: ignore[no-untyped-def]
    return _gradients(*residuals, *cotangents, plan, axis, score)


@partial(jax.custom_vjp, nondiff_argnums=(7, 8, 9))
def _gradients(q, k, v, out, lse, dout, dlse, plan, axis, score):  # type: ignore[no-untyped-def]
    dq, dkv = ring.backward(q, pack(k, v), out, lse, dout, dlse, plan, axis, score)
    dk, dv = jnp.split(dkv, [k.shape[-1]], -1)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _refuse_twice(*_: Any) -> Any:
    raise RuntimeError("ring_attention has no second derivative: differentiate it once, without a grad of a grad")


_attention.defvjp(_forward, _backward)
_gradients.defvjp(lambda *arguments: (_gradients(*arguments), None), _refuse_twice)
