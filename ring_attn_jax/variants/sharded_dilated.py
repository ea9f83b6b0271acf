"""Dilated attention of global arrays: a shard_map around ``dilated_attention`` for a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import Mesh

from ring_attn_core.keywords import named_keywords
from ring_attn_core.masks import causal
from ring_attn_core.problem.checks import check_array
from ring_attn_core.problem.options import Options
from ring_attn_core.runs import Band
from ring_attn_core.variants.dilated import Patterns

from ..axes import describe_arrays, dtype_names
from ..sharded import ShardedAxes, check_shards, over_mesh
from .dilated import attend

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float


@named_keywords
def sharded_dilated_attention(
    q: Float[Array, "batch tokens heads head_dim"],
    k: Float[Array, "batch tokens kv_heads head_dim"],
    v: Float[Array, "batch tokens kv_heads v_dim"],
    *,
    segments: tuple[int, ...],
    dilations: tuple[int, ...],
    mesh: Mesh | None = None,
    axis_name: str = "seq",
    batch_axes: str | Sequence[str] = (),
    head_axis: str | None = None,
    mixing: str = "softmax",
    mask: Band = causal(),
    key_mask: Bool[Array, "batch tokens"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    length: int | None = None,
    strategy: str = "auto",
    backend: str = "auto",
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """Compute :func:`dilated_attention` on global arrays in contiguous layout (natural order, padded).

    The mesh, its axes and the sharding of arrays are as in :func:`sharded_ring_attention`. Other arguments are those of
    dilated_attention. ``head_axis`` shards the heads, but the global index of a head determines the tokens that it keeps. So with
    ``head_axis`` the number of heads per device must be a multiple of each dilation, and ``mixing`` must be "softmax". Raise
    ValueError if heads or mixing break this rule, or if dilated_attention or sharded_ring_attention would refuse an argument.
    Raise NotImplementedError if ``axis_name`` is several axis names.
    """
    where, patterns = ShardedAxes.of(mesh, axis_name, batch_axes, head_axis), Patterns(segments, dilations, mixing)
    options = Options(
        layout="contiguous",
        mask=mask,
        length=length,
        scale=scale,
        softcap=softcap,
        strategy=strategy,
        backend=backend,
        deterministic=deterministic,
    )
    pairs = patterns.check()
    dtype_names(q, k, v)
    where = where.seen_in(q)
    check_shards(q, k, v, where)
    if head_axis is not None:
        local = q.shape[2] // where.mesh.shape[head_axis]
        if mixing != "softmax" or any(local % dilation for _, dilation in pairs):
            raise ValueError(
                f"over head_axis={head_axis!r} every member holds {local} heads: that must be a multiple of each dilation, and "
                f'mixing "softmax", got dilations={tuple(dilations)} and mixing={mixing!r}: leave head_axis out, or choose others'
            )
    inputs = {"q": q, "k": k, "v": v} | ({} if key_mask is None else {"key_mask": key_mask})
    for array in describe_arrays({name: x for name, x in inputs.items() if name == "key_mask"}):
        check_array(array, q.shape, k.shape)
    pattern_pairs = Patterns(tuple(segment for segment, _ in pairs), tuple(dilation for _, dilation in pairs), mixing)
    return over_mesh(_attend, (options, pattern_pairs), inputs, where, where.specs(k.shape[2]), return_lse)


def _attend(inputs: dict[str, Any], where: ShardedAxes, options: Options, patterns: Patterns) -> tuple[jax.Array, jax.Array]:
    q, k, v = (inputs[name] for name in "qkv")
    return attend(q, k, v, inputs.get("key_mask"), patterns, options, where.axis_name)
