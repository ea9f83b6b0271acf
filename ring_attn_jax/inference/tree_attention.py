"""Decode attention: a few new tokens attend to a cache that is sharded over the ranks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ring_attn_core.kernels.decode_backend import runnable_decode
from ring_attn_core.kernels.decode_call import DecodeCall
from ring_attn_core.problem.checks import INTEGERS
from ring_attn_core.problem.decode import Decode, DecodeArrays, check_positions

from ..attend.launch import capability, multiprocessors
from ..attend.slots import blockwise, by_kernels, end_by_kernel, merge, merge_by_kernel
from ..axes import describe_arrays, dtype_names, on_auto_axes, sharded_like, vary_alike
from ..data.extents import on_host
from .merge import gather_pairs, ranks_of, refuse_gradients

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


def tree_attention_decode(
    q: Float[Array, "batch queries heads head_dim"],
    k: Float[Array, "batch slots kv_heads head_dim"],
    v: Float[Array, "batch slots kv_heads v_dim"],
    *,
    q_positions: Int[Array, "batch queries"],
    k_positions: Int[Array, "batch slots"],
    axis_name: str = "seq",
    tree_mask: Bool[Array, "batch queries queries"] | None = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    alibi_slopes: Float[Array, " heads"] | None = None,
    k_scale: Float[Array, " kv_heads"] | None = None,
    v_scale: Float[Array, " kv_heads"] | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Any:
    """Compute exact attention of a few queries, replicated on all ranks, over a cache sharded over the ranks; for inference.

        s_ij  = scale q_i . k_j                           if 0 <= k_pos_j <= q_pos_i, and q_pos_i - k_pos_j <= window
        lse_i = log(exp(sink) + sum_j exp(s_ij))          natural log, over the slots of all ranks
        out_i = sum_j exp(s_ij - lse_i) v_j

    Each rank attends to its own slots. Then one all-gather exchanges the pairs (out, lse), packed in one array of float32
    (float64 for float64). Every rank merges the pairs in rank order, with the formula of :func:`merge` (Tree Attention, Shyam et
    al., arXiv:2408.04093). So all ranks get the same bits.

    Arguments (those not listed mean the same as in ``ring_attention``):
        q: ``[batch, queries, heads, head_dim]``, the same on every rank; bfloat16, float16, float32 or float64.
        k, v: ``[batch, slots, kv_heads, head_dim]`` and ``[..., v_dim]``, this rank's part of the cache, its tokens in any order;
            in q's dtype, or both in float8_e4m3fn.
        q_positions: integers ``[batch, queries]`` below 2^31, the same on every rank; -1: a query that sees no key.
        k_positions: integers ``[batch, slots]``: the position of the token in a slot. -1: the slot is empty, and its content,
            even NaN, has no effect. The requests of a batch may differ in length.
        axis_name: the mesh axis of the ring. Call this inside ``jax.shard_map`` over it, also with one device.
        tree_mask: bool ``[batch, queries, queries]``, for speculative decoding: the queries are the nodes of a tree of drafted
            tokens, whose keys are in the cache already. Node j of a request has q_position and k_position ``p + j`` for a
            common p, so alternative tokens have separate slots. ``tree_mask[:, i, j]`` is True if node i sees node j: if j is
            i or an ancestor of i. Every node also sees all keys before p. The depth of a node is the number of its ancestors.
            A node's window and ALiBi bias count from position p + depth. The caller rotates the node's q and k by that position.
        window: the number of positions before its own that a query sees; None: all.
        k_scale, v_scale: float32 ``[kv_heads]``, the scales of k and v in float8_e4m3fn: the true values are ``k k_scale`` and
            ``v v_scale``.
        backend: "auto", "triton" (NVIDIA GPUs: the slots are cut into splits that fill the GPU) or "blockwise" (all devices).
        return_lse: also return lse.

    Return ``out [batch, queries, heads, v_dim]`` in q's dtype, and with ``return_lse`` also ``lse [batch, queries, heads]`` in
    float32 (float64 for float64), the same on all ranks (``out_specs=P()``). A query that sees no key has out 0. Its lse is -inf
    or, with sinks, the sink of its head.

    Raise ValueError if inputs do not fit, outside a shard_map over the axis, or if the result is differentiated. Values are not
    checked, except that untraced positions must be below 2^31. In particular, the positions ``p + j`` of ``tree_mask`` are not
    checked.
    """
    ranks = ranks_of("tree_attention_decode", axis_name)
    places = as_int32("q_positions", q_positions), as_int32("k_positions", k_positions)
    arrays = DecodeArrays(q, k, v, *places, tree_mask, sinks, alibi_slopes, k_scale, v_scale)
    problem = _problem(arrays, {"window": window, "scale": scale, "softcap": softcap, "backend": backend})
    problem.check()
    (own,) = vary_alike((axis_name,), arrays._replace(sinks=None))  # sinks join after the gather, and stay replicated
    out, lse = _decode(problem, runnable_decode(problem), (axis_name, ranks), own._replace(sinks=sinks))
    return (out, lse) if return_lse else out


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _decode(problem: Decode, call: DecodeCall | None, ring: tuple[str, int], arrays: DecodeArrays) -> tuple[jax.Array, jax.Array]:
    """Compute (out, lse) of a checked problem by kernels with the parameters ``call``, or in plain jnp if ``call`` is None."""
    axis_name, ranks = ring

    def attend(arrays: DecodeArrays) -> tuple[jax.Array, jax.Array]:
        if call is None:
            out, lse = merge(gather_pairs(blockwise(arrays, problem), axis_name), arrays.sinks)
            return out.astype(arrays.q.dtype), lse
        pairs = by_kernels(arrays, call)
        if ranks == 1:
            return end_by_kernel(gather_pairs(pairs, axis_name)[0], arrays.sinks, call, None)
        pair = pairs[0] if call.splits == 1 else merge_by_kernel(pairs, call, None)
        return end_by_kernel(gather_pairs(pair, axis_name), arrays.sinks, call, ranks)

    q_specs, v_specs = sharded_like(arrays.q)[:3], sharded_like(arrays.v)
    return on_auto_axes(attend, (PartitionSpec(*q_specs, v_specs[3]), PartitionSpec(*q_specs)))(arrays)


@_decode.defjvp
def _(*_: Any) -> Any:
    refuse_gradients("tree_attention_decode")


def as_int32(name: str, positions: Any) -> Any:
    """Convert positions of any integer dtype to int32, traced ones clamped to at most 2^31 - 1; return other values unchanged."""
    dtype = str(getattr(positions, "dtype", ""))
    if dtype not in INTEGERS or dtype == "int32":
        return positions
    known = on_host(positions)
    if known is not None and known.size:
        check_positions(name, int(known.max()))
    positions = jnp.asarray(positions)
    if positions.dtype.itemsize >= 4:
        positions = jnp.minimum(positions, jnp.iinfo(jnp.int32).max)
    return positions.astype(jnp.int32)


def _problem(arrays: DecodeArrays, options: dict[str, Any]) -> Decode:
    dtypes = dtype_names(arrays.q, arrays.k, arrays.v)
    others = describe_arrays(dict(zip(arrays._fields[3:], arrays[3:], strict=True)))
    for name in ("q_positions", "k_positions"):
        if getattr(arrays, name) is None:
            raise ValueError(f"{name} must be an array, got None")
    shapes = {"q_shape": arrays.q.shape, "k_shape": arrays.k.shape, "v_shape": arrays.v.shape}
    where: dict[str, Any] = {"capability": capability(), "multiprocessors": multiprocessors()}
    return Decode(**shapes, dtypes=dtypes, arrays=others, device=jax.default_backend(), **where, **options)
