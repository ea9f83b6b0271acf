"""Ring attention of globally sharded arrays: the shard_map round ``ring_attention``, built for the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ring_attn_core.masks import causal
from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.problem.checks import check_array, check_dropout_rate, check_extents

from .api import ring_attention
from .attend.dropout import Draw, draw_of
from .axes import check_axis_name, described, dtype_names
from .data.extents import on_host

if TYPE_CHECKING:
    from jaxtyping import Array, Float


def sharded_ring_attention(
    q: Float[Array, "batch tokens heads head_dim"],
    k: Float[Array, "batch kv_tokens kv_heads head_dim"],
    v: Float[Array, "batch kv_tokens kv_heads v_dim"],
    *,
    mesh: Mesh,
    axis_name: str = "seq",
    batch_axes: str | Sequence[str] = (),
    head_axis: str | None = None,
    return_lse: bool = False,
    **arguments: Any,
) -> Any:
    """:func:`ring_attention` on whole arrays in layout order: q [batch, tokens, heads, head_dim], k, v [batch, tokens,
    kv_heads, ...].

    Tokens are sharded over the mesh axis ``axis_name``, batch over ``batch_axes``, heads over ``head_axis``; over mesh axes
    that are not named everything is replicated. Key heads go over ``head_axis`` too, except a single one (multi-query), which
    every member holds. All mesh axes are manual inside, so that nothing is gathered. Other arguments are ring_attention's, arrays
    whole too: extents [batch, tokens, 2] and key_mask [batch, kv_tokens] in layout order, sinks and alibi_slopes [heads]. Dropout
    keeps what it would keep on one device: every shard's offsets are filled in, and dropout_offset is added to them.

    Works with Auto and with Explicit mesh axes (those of ``jax.make_mesh``; train with them under ``jax.set_mesh(mesh)``, called
    before the weights are made), inside and outside jit; arrays that are sharded otherwise are resharded. Raises
    ValueError for an axis that the mesh does not have and for sizes that do not divide.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh, as jax.make_mesh makes them, got {mesh!r}")
    check_axis_name(axis_name)
    batch_axes = (batch_axes,) if isinstance(batch_axes, str) else tuple(batch_axes)
    dtype_names(q, k, v)
    _check(q, k, v, mesh, axis_name, batch_axes, head_axis)
    q_spec = PartitionSpec(batch_axes or None, axis_name, head_axis)
    kv_spec = PartitionSpec(batch_axes or None, axis_name, None if k.shape[2] == 1 else head_axis)
    tokens, heads = PartitionSpec(batch_axes or None, axis_name), PartitionSpec(head_axis)
    of_optional = {"extents": tokens, "key_mask": tokens, "sinks": heads, "alibi_slopes": heads}
    specs = {"q": q_spec, "k": kv_spec, "v": kv_spec, **of_optional}
    optional = {name: arguments.pop(name) for name in of_optional if arguments.get(name) is not None}
    for array in described(optional):
        check_array(array, q.shape, k.shape)
    if "extents" in optional:
        _check_extents(optional["extents"], k.shape[1], mesh.shape[axis_name], arguments)
    given = {"q": q, "k": k, "v": v, **optional}
    arrays: dict[str, Any] = {name: _on_explicit_axes(jnp.asarray(x), mesh, specs[name]) for name, x in given.items()}
    check_dropout_rate(arguments.get("dropout_rate", 0.0))
    seed, offset = arguments.pop("dropout_seed", None), arguments.pop("dropout_offset", (0, 0))
    if arguments.get("dropout_rate") and seed is not None:
        arrays["dropout_seed"] = draw_of(seed, offset)
    named = sorted({"axis_name": axis_name, "return_lse": return_lse, **arguments}.items())
    options = tuple((name, type(x), x) for name, x in named)  # since 1 equals True, and 64 equals 64.0
    kept = tuple((name, specs.get(name, PartitionSpec())) for name in arrays)
    try:
        attention = _compiled(mesh, kept, batch_axes, head_axis, options)
    except TypeError:  # an argument that cannot be hashed, which ring_attention speaks of
        attention = _compiled.__wrapped__(mesh, kept, batch_axes, head_axis, options)
    return attention(arrays)


@lru_cache(maxsize=1024)
def _compiled(
    mesh: Mesh,
    specs: tuple[tuple[str, PartitionSpec], ...],
    batch_axes: tuple[str, ...],
    head_axis: str | None,
    options: tuple[tuple[str, type, Any], ...],
) -> Any:
    """The program, made once: outside jit, a new function at every call would be compiled anew."""
    arguments = {name: x for name, _, x in options}

    def attention(arrays: dict[str, Any]) -> Any:
        if "dropout_seed" in arrays:
            low, high, batch, head = arrays["dropout_seed"]
            rows, _, heads, _ = arrays["q"].shape
            arrays["dropout_seed"] = Draw(low, high, batch + _first(batch_axes, rows), head + _first(head_axis, heads))
        return ring_attention(**arrays, **arguments)

    out = dict(specs)["q"]
    out_specs = (out, out) if arguments["return_lse"] else out
    return jax.jit(jax.shard_map(attention, mesh=mesh, in_specs=(dict(specs),), out_specs=out_specs))


def _first(axes: str | tuple[str, ...] | None, local: int) -> jax.Array:
    """The global index of this shard's first row or head, of which each shard has ``local``."""
    return lax.axis_index(axes).astype(jnp.uint32) * local if axes else jnp.uint32(0)


def _check_extents(extents: Any, keys: int, ranks: int, arguments: dict[str, Any]) -> None:
    """ValueError for values that are wrong, where this process can see them: not inside jit, nor those of other hosts."""
    values = on_host(jnp.asarray(extents))
    if values is None:
        return
    lengths: Any = extents.shape[1] // ranks, keys // ranks, arguments.get("length"), arguments.get("kv_length")
    plan = RingPlan(arguments.get("layout", "zigzag"), arguments.get("mask", causal()), ranks, *lengths)
    for runs, shard in zip(plan.q_runs, np.split(values.astype(np.int64), ranks, 1), strict=True):
        check_extents(shard, runs, plan.kv_length)


def _on_explicit_axes(x: jax.Array, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """``x`` sharded as ``spec`` says over the Explicit axes of the mesh; XLA shards it over the Auto ones."""
    explicit = {axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}
    if not explicit:
        return x
    kept = [
        tuple(axis for axis in ((axes,) if isinstance(axes, str) else axes or ()) if axis in explicit) or None for axes in spec
    ]
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*kept)))


def _check(
    q: jax.Array, k: jax.Array, v: jax.Array, mesh: Mesh, axis_name: str, batch_axes: tuple[str, ...], head_axis: str | None
) -> None:
    used = [axis_name, *batch_axes, *([head_axis] if head_axis else [])]
    for axis in used:
        if axis not in mesh.shape:
            raise ValueError(f"the mesh has no axis {axis!r}: its axes are {', '.join(mesh.axis_names)}")
        if used.count(axis) > 1:
            raise ValueError(f"mesh axis {axis!r} is named twice: tokens, batch and heads need an axis each")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} must have 4 dimensions [batch, tokens, heads, dim], got shape {list(x.shape)}")
        heads = 1 if head_axis is None or (name != "q" and x.shape[2] == 1) else mesh.shape[head_axis]
        batch = 1
        for axis in batch_axes:
            batch *= mesh.shape[axis]
        parts = (("batch rows", 0, batch), ("tokens", 1, mesh.shape[axis_name]), ("heads", 2, heads))
        for what, dim, size in parts:
            if x.shape[dim] % size:
                raise ValueError(
                    f"{name} has {x.shape[dim]} {what}, which {size} members of the mesh cannot share equally: "
                    + ("shard with to_layout, which pads, and pass length" if dim == 1 else "choose another mesh axis for them")
                )
