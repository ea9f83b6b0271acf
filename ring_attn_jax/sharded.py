"""Ring attention of globally sharded arrays: the shard_map round ``ring_attention``, built for the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from .api import ring_attention
from .varying import dtype_names

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
    every member holds. All mesh axes are manual inside, so that nothing is gathered. Other arguments are ring_attention's.

    Works with Auto and with Explicit mesh axes (those of ``jax.make_mesh``; train with them under ``jax.set_mesh(mesh)``, called
    before the weights are made), inside and outside jit; arrays that are sharded otherwise are resharded. Raises
    ValueError for an axis that the mesh does not have and for sizes that do not divide.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh, as jax.make_mesh makes them, got {mesh!r}")
    if not isinstance(axis_name, str):
        raise NotImplementedError(f"axis_name={axis_name!r}: a ring over several axes does not work yet, pass one name")
    batch_axes = (batch_axes,) if isinstance(batch_axes, str) else tuple(batch_axes)
    dtype_names(q, k, v)
    _check(q, k, v, mesh, axis_name, batch_axes, head_axis)
    replicated_keys = head_axis is not None and k.shape[2] == 1
    q_spec = PartitionSpec(batch_axes or None, axis_name, head_axis)
    kv_spec = PartitionSpec(batch_axes or None, axis_name, None if replicated_keys else head_axis)
    specs = q_spec, kv_spec, kv_spec
    q, k, v = (_on_explicit_axes(x, mesh, spec) for x, spec in zip((q, k, v), specs, strict=True))
    options = tuple(sorted({"axis_name": axis_name, "return_lse": return_lse, **arguments}.items()))
    try:
        attention = _compiled(mesh, specs, options)
    except TypeError:  # an argument that cannot be hashed: an array, which ring_attention speaks of
        attention = _compiled.__wrapped__(mesh, specs, options)
    return attention(q, k, v)


@lru_cache(maxsize=1024)
def _compiled(mesh: Mesh, specs: tuple[PartitionSpec, ...], options: tuple[tuple[str, Any], ...]) -> Any:
    """The program, made once: outside jit, a new function at every call would be compiled anew."""
    arguments = dict(options)
    out = (specs[0], specs[0]) if arguments["return_lse"] else specs[0]
    return jax.jit(jax.shard_map(partial(ring_attention, **arguments), mesh=mesh, in_specs=specs, out_specs=out))


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
