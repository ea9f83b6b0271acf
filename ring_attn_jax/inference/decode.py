"""Decode attention: a few new tokens attend to a cache that is sharded over the ranks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ring_attn_core.kernels.decode import DecodeCall
from ring_attn_core.kernels.decode_backend import runnable_decode
from ring_attn_core.problem.checks import INTEGERS
from ring_attn_core.problem.decode import Decode, check_positions

from ..attend.decode import DecodeArrays, blockwise, by_kernels, ended_by_kernel, merged, merged_by_kernel
from ..attend.launch import capability, multiprocessors
from ..axes import described, dtype_names, on_auto_axes, sharded_like, vary_alike
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
    """Compute exact attention of a few queries, the same on all ranks, over a cache that is sharded over the ranks.

        s_ij  = scale q_i . k_j                           if 0 <= k_pos_j <= q_pos_i, and q_pos_i - k_pos_j <= window
        lse_i = log(exp(sink) + sum_j exp(s_ij))          natural log, over the slots of all ranks
        out_i = sum_j exp(s_ij - lse_i) v_j

    For inference. Each rank attends to its own slots; then one collective carries out and lse, packed in one float32 array, and
    each rank merges them in the order of the ranks (Tree Attention, Shyam et al., arXiv:2408.04093; the merge is that of
    :func:`merge`). So all ranks get the same bits.

    Arguments (those of ``ring_attention`` mean the same here):
        q: ``[batch, queries, heads, head_dim]``, the same on each rank; bfloat16, float16, float32 or float64.
        k, v: ``[batch, slots, kv_heads, head_dim]`` and ``[..., v_dim]``, this rank's part of the cache, in any order; in q's
            dtype or both in float8_e4m3fn.
        q_positions: integers ``[batch, queries]`` below 2^31, the same on each rank; -1: a query that sees no key.
        k_positions: integers ``[batch, slots]``: the position of the token in a slot. -1: the slot is empty, and its content,
            NaN too, has no effect. The requests of a batch may be of different lengths.
        axis_name: the ring: call this inside ``jax.shard_map`` over a mesh with that axis, a mesh of one device if alone.
        tree_mask: bool ``[batch, queries, queries]``, for speculative decoding: the queries are the nodes of a tree of drafted
            tokens, whose keys are in the cache already, node j in the slot with k_pos ``p + j`` and ``p = q_positions[:, 0]``,
            and ``q_positions`` are p, p + 1, ... Node i sees node j if ``tree_mask[:, i, j]``: itself and its ancestors; and it
            sees all keys before p. So alternative tokens have slots of their own. The depth of a node, from which its window
            and ALiBi count, is the number of nodes it sees besides itself; rotating q and k by that depth is up to the caller.
        window: a query sees itself and this many positions before it; None: all.
        k_scale, v_scale: float32 ``[kv_heads]``, for k and v of float8_e4m3fn: the true ones are ``k k_scale`` and ``v v_scale``.
        backend: "auto", "triton" (NVIDIA GPUs: the slots are cut into splits that fill the GPU) or "blockwise" (any device).
        return_lse: also return lse.

    Returns ``out [batch, queries, heads, v_dim]`` in q's dtype, and with ``return_lse`` also ``lse [batch, queries, heads]`` in
    float32 (float64 for float64), the same on all ranks (``out_specs=P()``). A query that sees no key: out 0, lse -inf (or its
    sink).

    Raise ValueError if inputs do not fit, outside a shard_map over the axis, or if the result is differentiated. Values are not
    checked: with ``tree_mask``, q_positions must be as described there.
    """
    ranks = ranks_of("tree_attention_decode", axis_name)
    places = as_int32("q_positions", q_positions), as_int32("k_positions", k_positions)
    arrays = DecodeArrays(q, k, v, *places, tree_mask, sinks, alibi_slopes, k_scale, v_scale)
    problem = _problem(arrays, (window, scale, softcap, backend))
    problem.check()
    (own,) = vary_alike((axis_name,), arrays._replace(sinks=None))  # sinks join after the gather, and stay replicated
    out, lse = _decode(problem, runnable_decode(problem), (axis_name, ranks), own._replace(sinks=sinks))
    return (out, lse) if return_lse else out


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _decode(problem: Decode, call: DecodeCall | None, ring: tuple[str, int], arrays: DecodeArrays) -> tuple[jax.Array, jax.Array]:
    """Compute (out, lse) of a checked problem; ``ring``: the name of its axis and its number of ranks."""
    axis_name, ranks = ring

    def attend(arrays: DecodeArrays) -> tuple[jax.Array, jax.Array]:
        if call is None:
            out, lse = merged(gather_pairs(blockwise(arrays, problem), axis_name), arrays.sinks)
            return out.astype(arrays.q.dtype), lse
        pairs = by_kernels(arrays, call)
        if ranks == 1:
            return ended_by_kernel(gather_pairs(pairs, axis_name)[0], arrays.sinks, call, None)
        pair = pairs[0] if call.splits == 1 else merged_by_kernel(pairs, call, None)
        return ended_by_kernel(gather_pairs(pair, axis_name), arrays.sinks, call, ranks)

    of_q, of_v = sharded_like(arrays.q)[:3], sharded_like(arrays.v)
    return on_auto_axes(attend, (PartitionSpec(*of_q, of_v[3]), PartitionSpec(*of_q)))(arrays)


@_decode.defjvp
def _(*_: Any) -> Any:
    refuse_gradients("tree_attention_decode")


def as_int32(name: str, positions: Any) -> Any:
    """Return positions of another integer dtype as int32, and anything that is not an integer array unchanged.

    Raise ValueError if a known position exceeds int32.
    """
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


def _problem(arrays: DecodeArrays, options: tuple[Any, Any, Any, Any]) -> Decode:
    """Return the call as plain data; ``options``: window, scale, softcap and backend."""
    dtypes = dtype_names(arrays.q, arrays.k, arrays.v)
    others = described(dict(zip(arrays._fields[3:], arrays[3:], strict=True)))
    for name in ("q_positions", "k_positions"):
        if getattr(arrays, name) is None:
            raise ValueError(f"{name} must be an array, got None")
    window, scale, softcap, backend = options
    return Decode(
        q_shape=arrays.q.shape,
        k_shape=arrays.k.shape,
        v_shape=arrays.v.shape,
        dtypes=dtypes,
        arrays=others,
        device=jax.default_backend(),
        capability=capability(),
        multiprocessors=multiprocessors(),
        window=window,
        scale=scale,
        softcap=softcap,
        backend=backend,
    )
