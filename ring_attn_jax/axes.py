"""Checks of arrays and mesh axes that only JAX needs: whether a call is inside shard_map, and over which axes a value varies."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVarTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import concrete_or_error
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ring_attn_core.problem.checks import OptionalArray

Trees = TypeVarTuple("Trees")


def check_axis_name(axis_name: Any) -> None:
    """Raise NotImplementedError if ``axis_name`` is a tuple or list, and ValueError if it is anything else than a string."""
    if isinstance(axis_name, tuple | list):
        raise NotImplementedError(f"axis_name={axis_name!r}: a ring over several axes does not work yet, pass one name")
    if not isinstance(axis_name, str):
        raise ValueError(f"axis_name must be the name of a mesh axis, got {axis_name!r}")


WHOLE = "use sharded_ring_attention(..., mesh=mesh), which builds the shard_map itself"


def ring_size(axis_name: Any, call: str = "ring_attention", instead: str = WHOLE) -> int:
    """Return the number of ranks of the mesh axis; ``call`` and ``instead`` complete the error's advice outside a shard_map."""
    return axis_size(axis_name, f"call {call} inside jax.shard_map over a mesh with an axis of that name, or {instead}")


def axis_size(axis_name: Any, outside: str) -> int:
    """Return the number of ranks of the mesh axis; ``outside``: the advice if no shard_map surrounds the call."""
    check_axis_name(axis_name)
    try:
        return lax.axis_size(axis_name)
    except NameError as error:
        raise ValueError(unknown_axis(axis_name, outside)) from error


def unknown_axis(axis_name: Any, outside: str) -> str:
    """Return the error that ``axis_name`` is not a mesh axis here; ``outside``: the advice if no shard_map surrounds the call."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    advice = f"this shard_map is over {', '.join(axes)}: pass axis_name={choice_of(axes)}" if axes else outside
    return f"axis_name={axis_name!r} is not a mesh axis here{', ' if axes else ': '}{advice}"


def choice_of(axes: Sequence[str]) -> str:
    """Return the quoted axis names joined by "or" for an error message, such as "'rows' or 'seq'"."""
    return " or ".join(map(repr, axes))


def dtype_names(q: Any, k: Any, v: Any) -> tuple[str, str, str]:
    """Return the dtype names of q, k and v, after checks that JAX can compute with these arrays."""
    for name, array in zip("qkv", (q, k, v), strict=True):
        if not hasattr(array, "dtype") or not hasattr(array, "shape"):
            raise ValueError(f"q, k and v must be arrays, got {type(array).__name__}")
        if not all(isinstance(size, int) for size in array.shape[1:]):
            raise ValueError(
                f"{name} has the symbolic shape ({', '.join(map(str, array.shape))}): jax.export may leave the batch "
                "open, and every other size must be known: the plan of the ring is made of it. Export one program for each length"
            )
        if array.dtype == np.float64 and not jax.config.jax_enable_x64:  # type: ignore[attr-defined]
            raise ValueError('float64 needs jax.config.update("jax_enable_x64", True) before the first array is made')
    return str(q.dtype), str(k.dtype), str(v.dtype)


def describe_arrays(arrays: dict[str, Any]) -> tuple[OptionalArray, ...]:
    """Return name, shape and dtype of the optional arrays that were passed."""
    present = {name: x for name, x in arrays.items() if x is not None}
    for name, x in present.items():
        if not hasattr(x, "dtype") or not hasattr(x, "shape"):
            raise ValueError(f"{name} must be an array, got {type(x).__name__}")
    return tuple(OptionalArray(name, tuple(x.shape), str(x.dtype)) for name, x in present.items())


def vary_alike(axes: tuple[str, ...], *trees: *Trees) -> tuple[*Trees]:
    """Mark all arrays as varying over ``axes`` and over each mesh axis that any of them varies over.

    Call this before the custom_vjp. Then JAX sums an array's gradient over the axes on which the array was replicated.
    """
    union = frozenset().union(*(axes_of(x) for x in (*jax.tree.leaves(trees), *map(lax.axis_index, axes))))
    vary = lambda x: lax.pcast(x, tuple(sorted(union - axes_of(x))), to="varying") if union - axes_of(x) else x
    return jax.tree.map(vary, trees)


def axes_of(x: Any) -> frozenset[str]:
    """Return the mesh axes that ``x`` varies over (jax 0.10 and 0.12 keep them in different places)."""
    kind = jax.typeof(x)
    return kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying


def checks_are_off(axis_name: str) -> bool:
    """Return True if the shard_map over the axis has ``check_vma=False``, under which not even ``axis_index`` is varying."""
    return axis_name not in axes_of(lax.axis_index(axis_name))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def without_derivative(call: str, x: jax.Array) -> jax.Array:
    """Return ``x`` unchanged, but raise ValueError if JAX differentiates this identity; ``call`` names the public function."""
    return x


@without_derivative.defjvp
def _refuse(call: str, primals: Any, tangents: Any) -> Any:
    raise ValueError(
        f"{call} has no derivative inside jax.shard_map(check_vma=False): there JAX does not sum the gradients of replicated "
        "weights over the ranks, and each rank would train on its own part, times their number. Leave check_vma at its default"
    )


def mapped_over_mesh() -> bool:
    """Return True if a ``jax.vmap`` with spmd_axis_name surrounds this call. JAX has only a private function for this."""
    environment = getattr(sys.modules.get("jax._src.core"), "get_axis_env", None)
    return environment is not None and bool(getattr(environment(), "spmd_axis_names", ()))


def sharded_like(x: Any) -> PartitionSpec:
    """Return the sharding of ``x`` over the Explicit mesh axes: for each dimension an axis, a tuple of axes, or None."""
    return jax.typeof(x).sharding.spec


def explicit_axes() -> tuple[str, ...]:
    """Return the Explicit axes of the context's mesh; inside a shard_map, only those that are not manual."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit)


def on_mesh(x: Any, mesh: Any, spec: PartitionSpec) -> jax.Array:
    """Return ``x`` sharded as ``spec`` over the Explicit axes, copied to the mesh first if it is committed to other devices."""
    x = jnp.asarray(x)
    value = concrete(x)
    if isinstance(mesh, Mesh) and value is not None and value.committed and value.sharding.device_set != {*mesh.devices.flat}:
        x = jax.device_put(x, NamedSharding(mesh, spec))
    return on_explicit_axes(x, mesh, spec)


def concrete(x: jax.Array) -> Any:
    """Return the value of ``x`` as a JAX array, or None if ``x`` has no value, as inside jit."""
    try:
        return jnp.asarray(concrete_or_error(None, x))
    except jax.errors.ConcretizationTypeError:
        return None


def on_explicit_axes(x: jax.Array, mesh: Any, spec: PartitionSpec) -> jax.Array:
    """Return ``x`` sharded as ``spec`` over the Explicit axes of the mesh. Leave the Auto axes to XLA."""
    explicit = {axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}
    if not explicit:
        return x
    kept = [
        tuple(axis for axis in ((axes,) if isinstance(axes, str) else axes or ()) if axis in explicit) or None for axes in spec
    ]
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*kept)))


def on_auto_axes(function: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
    """Wrap ``function`` so that the caller's Explicit mesh axes are Auto inside it. ``out_specs``: the sharding of the results.

    Otherwise a loop whose carry starts as new zeros fails, because a step returns a carry of another type. The wrapper is jitted,
    because outside jit a shard_map evaluates one operation at a time.
    """
    explicit = explicit_axes()
    if not explicit:
        return function
    return jax.jit(jax.sharding.auto_axes(function, axes=explicit, out_sharding=out_specs))
