"""The values of a JAX checkpoint by name: the leaves of all nnx variables of a model and its optimizer, except intermediates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ring_attn_core.model.progress import Kinds
from ring_attn_core.model.replica_check import name_entries
from ring_attn_core.validation import in_words

from .ranks import check_exists

NUMBER = "number"
"""The dtype of a Python number in ``Kinds``."""


def values_of(model: nnx.Module, optimizer: nnx.Optimizer | None) -> dict[str, Any]:
    """Map the name of each array, number and text, such as ``model.blocks.0.mlp.up.kernel``, to its value."""

    def each() -> Iterator[tuple[str, Any]]:
        for which, module in (("model", model), ("optimizer", optimizer)):
            if not isinstance(module, nnx.Pytree) and (which == "model" or module is not None):
                raise ValueError(
                    f"{which} must be an nnx module, got {type(module).__name__}: nnx.Dict(state=nnx.Variable(x)) holds "
                    "any pytree x, and nnx.Optimizer(model, transformation, wrt=nnx.Param) optax's transformations"
                )
            for path, variable in _variables(module):
                for keys, x in jax.tree_util.tree_leaves_with_path(variable.get_value()):
                    yield _name(which, path, keys), x

    found = name_entries(each())
    for name, x in found.items():
        is_array = hasattr(x, "dtype") and not (isinstance(x, np.ndarray | np.generic) and x.dtype.kind in "OSUMm")
        if not is_array and not is_plain(x):
            raise ValueError(
                f"{name} is {in_words(x)}, and a checkpoint holds arrays, numbers and texts: keep it outside of nnx variables"
            )
    return found


def set_values(model: nnx.Module, optimizer: nnx.Optimizer | None, values: dict[str, Any]) -> None:
    for which, module in (("model", model), ("optimizer", optimizer)):
        flat = []
        for path, variable in _variables(module):
            new = lambda keys, x, path=path, which=which: _like(x, values[_name(which, path, keys)])
            flat.append((path, variable.replace(jax.tree_util.tree_map_with_path(new, variable.get_value()))))
        if flat:
            nnx.update(module, nnx.from_flat_state(flat))


def split(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays that orbax can write, which has none of size 0 and no weak types, and run.json's other entries."""
    plain: dict[str, Any] = {}
    for name, x in values.items():
        check_exists(name, x)
        if isinstance(x, jax.ShapeDtypeStruct):
            raise ValueError(f"{name} has no values yet: initialise or load the model before it is saved")
        is_weak = getattr(x, "weak_type", False) and x.shape == () and x.dtype.kind != "c"
        plain |= {name: x.item() if is_weak else x} if is_weak or is_plain(x) else {}
    arrays = {name: _data(x) for name, x in values.items() if name not in plain}
    empty = {name: kind_of(x) for name, x in arrays.items() if not x.size}
    return {name: x for name, x in arrays.items() if x.size}, {"values": plain, "empty": empty}


def is_plain(x: Any) -> bool:
    return type(x) in (bool, int, float, str)


def kind_of(x: Any) -> tuple[str, tuple[int, ...]]:
    """Return (dtype, shape) of an array or of the data of random keys. A plain value has dtype "number" or "str", shape ()."""
    if is_plain(x):
        return ("str" if isinstance(x, str) else NUMBER), ()
    return str(_data(x).dtype), tuple(_data(x).shape)


def kinds_for(values: dict[str, Any], held: Kinds, model: nnx.Module, optimizer: nnx.Optimizer | None) -> Kinds:
    """Return the kinds that a checkpoint must have for ``values``. It has its own, ``held``, where a run may change them or an
    optimizer's step promotes them."""
    kinds = {name: kind_of(x) for name, x in values.items()}
    other = {name: held[name] for name, kind in kinds.items() if held.get(name, kind) != kind and held[name][1] == kind[1]}
    later = _later_kinds(model, optimizer) if any(name.startswith("optimizer.") for name in other) else set()
    is_number = lambda name: NUMBER in (held[name][0], kinds[name][0]) or ".hyperparams." in name
    is_settable = lambda name: is_number(name) and "str" not in (held[name][0], kinds[name][0])
    return kinds | {name: kind for name, kind in other.items() if is_settable(name) or (name, kind) in later}


def place(x: Any, kind: tuple[str, tuple[int, ...]]) -> Any:
    """Return an array of ``kind`` on the devices to which ``x`` is committed, or its description; else zeros in host memory."""
    dtype, shape = jnp.dtype(kind[0]), kind[1]
    if not isinstance(x, jax.Array) or not x.committed:
        return np.zeros(shape, dtype)
    if 0 in shape:
        return jnp.zeros(shape, dtype, device=x.sharding)
    return _data(x) if kind_of(x) == kind else jax.ShapeDtypeStruct(shape, dtype, sharding=x.sharding)


def _later_kinds(model: nnx.Module, optimizer: Any) -> set[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Return (name, kind) of each state of a new optimizer, and after a step with gradients of the weights' dtypes or float32."""

    def states(params: Any) -> list[Any]:
        first = optimizer.tx.init(params)
        gradients = params, jax.tree.map(lambda p: p.astype(jnp.float32), params)
        return [first, *(optimizer.tx.update(each, first, params)[1] for each in gradients)]

    is_variable = lambda x: isinstance(x, nnx.Variable)
    params = jax.tree.map(lambda x: x.get_value(), nnx.state(model, optimizer.wrt), is_leaf=is_variable)
    try:
        found = jax.eval_shape(states, params)
    except Exception:  # an optimizer whose step takes more arguments
        return set()
    leaves = [leaf for state in found for leaf in jax.tree_util.tree_leaves_with_path(state)]
    return {(_name("optimizer", ("opt_state",), keys), kind_of(x)) for keys, x in leaves}


def _variables(module: Any) -> Any:
    """Return (path, variable) of each variable of a module except intermediates, which last for one call; of None, nothing."""
    return () if module is None else nnx.to_flat_state(nnx.state(module, nnx.Not(nnx.Intermediate)))


def _name(which: str, path: tuple[Any, ...], keys: Any) -> str:
    inside = [jax.tree_util.keystr(keys, simple=True, separator=".")] if keys else []
    return ".".join(map(str, (which, *path, *inside)))


def _data(x: Any) -> Any:
    """Return ``x``, an array if it is a NumPy scalar, or the integer data of its keys if it holds keys of jax.random."""
    x = np.asarray(x) if isinstance(x, np.generic) else x
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _like(x: Any, data: Any) -> Any:
    """Return ``data`` as keys or a weakly typed array if ``x`` is one, committed to devices only if ``x`` is."""
    if not isinstance(x, jax.Array):
        return data
    if is_plain(data):
        return jax.device_put(jnp.asarray(data), x.sharding if x.committed else None)
    data = jax.device_put(data) if isinstance(data, np.ndarray) else data
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x)) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else data
