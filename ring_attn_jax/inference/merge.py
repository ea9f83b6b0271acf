"""The merge of attention over sharded keys: one all-gather turns each rank's (out, lse) into the (out, lse) over all keys."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ring_attn_core.problem.checks import check_own_pair

from ..attend.slots import merge
from ..attend.tiles import accumulation_dtype
from ..axes import axes_of, axis_size


def merge_ring(pair: tuple[jax.Array, jax.Array], *, axis_name: str = "seq") -> tuple[jax.Array, jax.Array]:
    """Merge each rank's (out [b s h e], lse [b s h]) over its own keys into (out, lse) over all keys.

    The result equals that of :func:`merge` on the pairs of all ranks up to rounding. One all-gather exchanges the pairs, each
    packed in one array of the result's dtype. Every rank merges them in rank order, so all ranks get the same bits. The lse is a
    natural logarithm. If a query sees no key of a rank, that rank passes out 0 and lse -inf for the query, and does not change
    the result.

    Call inside ``jax.shard_map`` over ``axis_name``; the result is the same on all ranks (``out_specs=P()``). The result is
    float64 if out or lse is float64, else float32.

    For inference: not differentiable. Raise ValueError if ``pair`` is not (out, lse) in floating dtypes, if lse's shape is not
    ``out.shape[:-1]``, outside a shard_map over the axis, or if the result is differentiated.
    """
    check_own_pair(pair, lambda x: hasattr(x, "shape") and hasattr(x, "dtype"), "an array")
    ranks_of("merge_ring", axis_name)
    out, lse = pair
    wide = accumulation_dtype(out.dtype if lse.dtype != jnp.float64 else lse.dtype)
    packed = jnp.concatenate([out.astype(wide), lse.astype(wide)[..., None]], -1)
    return _merge(axis_name, packed)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _merge(axis_name: str, packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    return merge(gather_pairs(packed, axis_name), None)


@_merge.defjvp
def _(axis_name: str, *_: Any) -> Any:
    refuse_gradients("merge_ring")


def gather_pairs(pair: jax.Array, axis_name: str) -> jax.Array:
    """All-gather the ranks' packed (out, lse) arrays, in rank order: [...] -> [ranks, ...]."""
    varying = pair if axis_name in axes_of(pair) else lax.pcast(pair, (axis_name,), to="varying")
    return lax.all_gather(varying, axis_name, to="invarying")


def refuse_gradients(call: str) -> None:
    raise ValueError(
        f"{call} is for inference and has no gradient: pass jax.lax.stop_gradient(x) of what it is given. For training there are "
        "ring_attention, attend_block and merge"
    )


def ranks_of(call: str, axis_name: Any) -> int:
    """Return the number of ranks of the mesh axis. Outside a shard_map over it, raise ValueError that names function ``call``."""
    inside = f"call {call} inside jax.shard_map over a mesh with that axis, of one device where there is but one"
    return axis_size(axis_name, inside)
