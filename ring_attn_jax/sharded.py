"""Ring attention of globally sharded arrays: a shard_map around ``ring_attention``, built for the mesh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ring_attn_core.data.layout_check import check_order, where_held
from ring_attn_core.keywords import named_keywords
from ring_attn_core.masks import causal
from ring_attn_core.plan.balanced_layout import BalancedLayout
from ring_attn_core.plan.needed import NeededPlan, check_available
from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.problem.checks import check_array, check_extents, check_key_extents, check_v_dim, rate_of
from ring_attn_core.problem.options import Options
from ring_attn_core.problem.strategies import Strategy, plan_of_steps
from ring_attn_core.runs import Band
from ring_attn_core.validation import in_words

from .attend.dropout import dropout_state
from .axes import check_axis_name, choice_of, concrete, describe_arrays, dtype_names, mapped_over_mesh, on_mesh
from .call.autograd import attention
from .call.prepare import Arrays
from .call.traced import TracedLayout, trace_layout
from .data.extents import on_host

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


@named_keywords
def sharded_ring_attention(
    q: Float[Array, "batch tokens heads head_dim"],
    k: Float[Array, "batch kv_tokens kv_heads head_dim"],
    v: Float[Array, "batch kv_tokens kv_heads v_dim"] | None = None,
    *,
    v_dim: int | None = None,
    mesh: Mesh | AbstractMesh | None = None,
    axis_name: str = "seq",
    batch_axes: str | Sequence[str] = (),
    head_axis: str | None = None,
    layout: str | BalancedLayout | TracedLayout = "zigzag",
    mask: Band = causal(),
    extents: Int[Array, "batch tokens 2"] | None = None,
    key_extents: Int[Array, "batch kv_tokens 2"] | None = None,
    key_mask: Bool[Array, "batch kv_tokens"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    alibi_slopes: Float[Array, " heads"] | None = None,
    dropout_rate: float | None = None,
    dropout_seed: int | Int[Array, ""] | None = None,
    dropout_offset: tuple[int | Array, int | Array] = (0, 0),
    length: int | None = None,
    kv_length: int | None = None,
    strategy: Strategy = "auto",
    order: str = "ring",
    backend: str = "auto",
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """Compute :func:`ring_attention` on global arrays in layout order. ``mesh``: None stands for the mesh of ``jax.set_mesh``.

    Shapes: q [batch, tokens, heads, head_dim], k and v [batch, kv_tokens, kv_heads, ...]. If v is None, the values are k's first
    v_dim columns. Tokens are sharded over the mesh axis ``axis_name``, batch over ``batch_axes``, heads over ``head_axis``; over
    other mesh axes all arrays are replicated. Without ``batch_axes`` the batch keeps the axes that shard the rows of q if they
    are known: Explicit axes, and outside jit also Auto axes. Inside jit, rows over Auto axes are all-gathered unless you name the
    axes. Key heads are sharded over ``head_axis`` too, but a single key head (multi-query) is replicated. The shard_map is manual
    over all mesh axes. Other arguments are those of ring_attention, with global arrays: extents [batch, tokens, 2], key_extents
    [batch, kv_tokens, 2] and key_mask [batch, kv_tokens] in layout order, sinks and alibi_slopes [heads]. The dropout mask equals
    that of one device: each shard adds the global indices of its first batch row and first head to dropout_offset.

    Works with Auto and Explicit mesh axes, inside and outside jit. ``jax.make_mesh`` makes Explicit axes: to train with them,
    call ``jax.set_mesh(mesh)`` before the weights are made. Outside jit, jax.grad works on Auto axes or after that call. Works
    under jax.vmap; its spmd_axis_name may be a mesh axis other than ``axis_name``, ``batch_axes`` and ``head_axis``. Arrays with
    other shardings are resharded. Outside jit, if a ``Mesh`` is passed, arrays on other devices are copied to the mesh. If a
    jitted function calls this one, the arguments of the jitted function must be on the mesh's devices, or uncommitted.

    Raise ValueError without a mesh, or if the mesh lacks an axis, an axis is named twice, an array dimension is not a multiple of
    the size of its mesh axes, or ring_attention refuses an argument. Raise NotImplementedError if ``axis_name`` is a tuple or
    list.
    """
    options = Options(
        layout="contiguous" if isinstance(layout, TracedLayout) else layout,
        mask=mask,
        length=length,
        kv_length=kv_length,
        scale=scale,
        softcap=softcap,
        dropout_rate=rate_of(dropout_rate, dropout_seed),
        strategy=strategy,
        order=order,
        backend=backend,
        deterministic=deterministic,
        v_dim=check_v_dim(v_dim, getattr(k, "shape", ()), None if v is None else getattr(v, "shape", ())),
    )
    where = ShardedAxes.of(mesh, axis_name, batch_axes, head_axis)
    state = dropout_state(dropout_seed, dropout_offset) if options.dropout_rate and dropout_seed is not None else None
    arrays = Arrays(extents, key_mask, sinks, alibi_slopes, state, key_extents)
    if isinstance(layout, TracedLayout):
        options, arrays = trace_layout(options, layout, arrays, q.shape, None)
    return run_sharded(q, k, v, arrays, options, where, return_lse)


class ShardedAxes(NamedTuple):
    """The mesh, and the names of its axes over which tokens, batch rows and heads are sharded."""

    mesh: Mesh | AbstractMesh
    axis_name: str
    batch_axes: tuple[str, ...]
    head_axis: str | None

    @classmethod
    def of(cls, mesh: Any, axis_name: Any, batch_axes: str | Sequence[str], head_axis: str | None) -> ShardedAxes:
        """Check the arguments and return them as ``ShardedAxes``. ``mesh``: None stands for the mesh of ``jax.set_mesh``."""
        context = jax.sharding.get_abstract_mesh()
        mesh = context if mesh is None else mesh
        if not isinstance(mesh, Mesh | AbstractMesh):
            raise ValueError(f"mesh must be a jax.sharding.Mesh, as jax.make_mesh makes them, got {mesh!r}")
        if mesh.empty:
            raise ValueError("there is no mesh: pass mesh=, or call under jax.set_mesh(mesh)")
        check_axis_name(axis_name)
        batch_axes = (batch_axes,) if isinstance(batch_axes, str) else batch_axes
        if not isinstance(batch_axes, tuple | list) or not all(isinstance(axis, str) for axis in batch_axes):
            raise ValueError(f"batch_axes must be the name of a mesh axis, or a tuple of names, got {in_words(batch_axes)}")
        if not isinstance(head_axis, str | None):
            raise ValueError(f"head_axis must be the name of a mesh axis, or None, got {in_words(head_axis)}")
        used = [axis_name, *batch_axes, *([head_axis] if head_axis else [])]
        keywords = ["axis_name", *["batch_axes"] * len(batch_axes), "head_axis"]
        for axis, keyword in zip(used, keywords, strict=False):
            if axis not in mesh.shape:
                free = [name for name in mesh.axis_names if name not in used]
                advice = f"pass {keyword}={choice_of(free)}" if free else "make a mesh with that axis"
                raise ValueError(f"the mesh has no axis {axis!r}: its axes are {', '.join(mesh.axis_names)}, {advice}")
            if axis in context.manual_axes:
                advice = "call ring_attention in place of sharded_ring_attention, and make layers and call loss without mesh="
                raise ValueError(f"this call is inside a shard_map over {axis!r}, so its arrays are shards: {advice}")
            if used.count(axis) > 1:
                raise ValueError(f"mesh axis {axis!r} is named twice: tokens, batch and heads need an axis each")
        return cls(mesh, axis_name, tuple(batch_axes), head_axis)

    @property
    def ranks(self) -> int:
        return self.mesh.shape[self.axis_name]

    def seen_in(self, q: jax.Array) -> ShardedAxes:
        """Return these axes, with those that visibly shard the rows of q as ``batch_axes`` if none were passed."""
        if self.batch_axes:
            return self
        value = concrete(q)
        sharding = jax.typeof(q).sharding if value is None else value.sharding
        over = sharding.spec[:1] if isinstance(sharding, NamedSharding) and sharding.mesh.shape == self.mesh.shape else ()
        names = next(((axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in over), ())
        return self._replace(batch_axes=tuple(axis for axis in names if axis not in (self.axis_name, self.head_axis)))

    def specs(self, kv_heads: int) -> dict[str, PartitionSpec]:
        """Map "q", "k", "v" and the field names of ``Arrays`` to PartitionSpecs. A single key head is replicated."""
        batch = self.batch_axes or None
        tokens, heads = PartitionSpec(batch, self.axis_name), PartitionSpec(self.head_axis)
        keys = PartitionSpec(batch, self.axis_name, None if kv_heads == 1 else self.head_axis)
        optional = {"extents": tokens, "key_extents": tokens, "key_mask": tokens, "sinks": heads, "alibi_slopes": heads}
        return {
            "q": PartitionSpec(*tokens, *heads),
            "k": keys,
            "v": keys,
            **optional,
            "dropout_seed": PartitionSpec(),
            "positions": PartitionSpec(),
        }


def run_sharded(q: Any, k: Any, v: Any, arrays: Arrays, options: Options, where: ShardedAxes, return_lse: bool = False) -> Any:
    """Compute ``sharded_ring_attention`` from arguments packed into records. ``v``: None if the values are columns of k."""
    values, options = k if v is None else v, options.in_ring(where.ranks)
    dtype_names(q, k, values)
    where = where.seen_in(q)
    check_shards(q, k, values, where)
    for array in describe_arrays(arrays._replace(dropout_seed=None, positions=None)._asdict()):
        check_array(array, q.shape, k.shape)
    if arrays.positions is None:
        _check_intervals(arrays, q.shape[1], k.shape[1], options, where)
    inputs = {"q": q, "k": k, "v": v, **arrays._asdict()}
    return over_mesh(_attend, (options,), inputs, where, where.specs(k.shape[2]), return_lse)


def _attend(inputs: dict[str, Any], where: ShardedAxes, options: Options) -> tuple[jax.Array, jax.Array]:
    q, k, v = inputs.pop("q"), inputs.pop("k"), inputs.pop("v", None)
    arrays = Arrays(**inputs)
    if (state := arrays.dropout_seed) is not None:
        rows, _, heads, _ = q.shape
        first_row, first_head = _first(where.batch_axes, rows), _first(where.head_axis, heads)
        arrays = arrays._replace(dropout_seed=state._replace(batch=state.batch + first_row, head=state.head + first_head))
    return attention(q, k, v, arrays, options, where.axis_name)


def over_mesh(
    attend: Any, settings: tuple[Any, ...], inputs: dict[str, Any], where: ShardedAxes, specs: dict[str, Any], return_lse: bool
) -> Any:
    """Return out, or (out, lse), of ``attend(shards, where, *settings)``. Calls with equal ``settings`` compile once."""
    put = lambda name, x: x if name == "dropout_seed" else on_mesh(x, where.mesh, specs[name])
    placed = {name: put(name, x) for name, x in inputs.items() if x is not None}
    named = tuple((name, specs[name]) for name in placed)
    return _compile(attend, settings, where, named, return_lse, mapped_over_mesh())(placed)


@lru_cache(maxsize=1024)
def _compile(
    attend: Any, settings: tuple[Any, ...], where: ShardedAxes, specs: tuple[tuple[str, Any], ...], return_lse: bool, mapped: bool
) -> Any:
    """Return the jitted function, cached, because each call outside jit would compile anew. Under a vmap with spmd_axis_name
    (``mapped``), whose types ``check_vma`` refuses, this check is off."""

    def on_shards(inputs: dict[str, Any]) -> Any:
        out, lse = attend(inputs, where, *settings)
        return (out, lse) if return_lse else out

    input_specs = dict(specs)
    result = (input_specs["q"], input_specs["q"]) if return_lse else input_specs["q"]
    return jax.jit(jax.shard_map(on_shards, mesh=where.mesh, in_specs=(input_specs,), out_specs=result, check_vma=not mapped))


def _first(axes: str | tuple[str, ...] | None, local: int) -> jax.Array:
    """Return the global index of this shard's first row or head. ``local``: number of rows or heads per shard."""
    return lax.axis_index(axes).astype(jnp.uint32) * local if axes else jnp.uint32(0)


def _check_intervals(arrays: Arrays, queries: int, keys: int, options: Options, where: ShardedAxes) -> None:
    """Raise ValueError if an extent or key extent is invalid, or "direct" lacks a key. Skip arrays that this host cannot read."""
    lengths: Any = queries // where.ranks, keys // where.ranks, options.length, options.kv_length

    def shards(extents: Any) -> list[Any]:
        values = None if extents is None else on_host(jnp.asarray(extents))
        return [] if values is None else np.split(values.astype(np.int64), where.ranks, 1)

    extents, key_extents = shards(arrays.extents), shards(arrays.key_extents)
    if extents or key_extents:
        plan = RingPlan(options.layout, options.mask, where.ranks, *lengths)
        steps = plan_of_steps("direct", plan, 1, 1, extents=True) if options.strategy == "direct" else plan
        for rank, shard in enumerate(extents):
            check_extents(shard, plan.q_runs[rank], plan.kv_length)
            if isinstance(steps, NeededPlan):
                check_available(shard, steps, rank)
        for runs, shard in zip(plan.k_runs, key_extents, strict=False):
            check_key_extents(shard, runs, plan.length)
        for name, held in (("extents", extents), ("key_extents", key_extents)):
            if plan.q_runs == plan.k_runs:
                check_order(name, [where_held(x, plan.q_runs[rank], rank * plan.seq_local) for rank, x in enumerate(held)])


def check_shards(q: jax.Array, k: jax.Array, v: jax.Array, where: ShardedAxes) -> None:
    """Raise ValueError if a dimension is not a multiple of the size of its mesh axes; a single head of k or v is replicated."""
    shape = where.mesh.shape
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} must have 4 dimensions [batch, tokens, heads, dim], got shape {list(x.shape)}")
        heads = 1 if where.head_axis is None or (name != "q" and x.shape[2] == 1) else shape[where.head_axis]
        batch = math.prod(shape[axis] for axis in where.batch_axes)
        for what, dim, size in (("batch rows", 0, batch), ("tokens", 1, where.ranks), ("heads", 2, heads)):
            if x.shape[dim] % size:
                raise ValueError(
                    f"{name} has {x.shape[dim]} {what}, which {size} members of the mesh cannot share equally: "
                    + ("shard with to_layout, which pads, and pass length" if dim == 1 else "choose another mesh axis for them")
                )
