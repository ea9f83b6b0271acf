"""Weights as numpy arrays, with the same names and orientation in ring_attn_jax and ring_attn_torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ring_attn_core.model.replica_check import name_entries
from ring_attn_core.model.weight_names import check_state

from ..attend.tiles import accumulation_dtype

Module = TypeVar("Module", bound=nnx.Module)


def to_numpy(module: nnx.Module) -> dict[str, np.ndarray]:
    """Return numpy copies of a module's parameters by dotted name, such as ``blocks.0.attention.q.weight`` [out, in].

    bfloat16 and float16 become float32. ``from_numpy`` of the JAX or the PyTorch package reads the result.
    """
    state = {}
    for name, (path, p) in _parameters(module).items():
        state[name] = _transpose(path, np.array(p[...], accumulation_dtype(p.dtype)))
    return state


def from_numpy(module: Module, state: Mapping[str, np.ndarray]) -> Module:
    """Set the parameters of ``module``, each in its own dtype, to the arrays ``state``. Return ``module``.

    ``state``: arrays from ``to_numpy`` of the JAX or the PyTorch package. A parameter that is committed to the devices of a mesh
    keeps its sharding. Raise ValueError if weights are missing, unexpected or of another shape. The error lists them, and nothing
    changes.
    """
    parameters = _parameters(module)
    check_state(
        {name: _transpose(path, p[...]).shape for name, (path, p) in parameters.items()},
        {name: np.shape(x) for name, x in state.items()},
    )
    flat = [(path, p.replace(_place(_transpose(path, state[name]), p[...]))) for name, (path, p) in parameters.items()]
    nnx.update(module, nnx.from_flat_state(flat))
    return module


def _parameters(module: nnx.Module) -> dict[str, tuple[tuple[Any, ...], Any]]:
    """Return {name: (flax path, variable)} of all parameters, by PyTorch name, such as ``blocks.0.attention.q.weight``."""
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return name_entries((".".join(map(str, (*path[:-1], _NAMES.get(str(path[-1]), path[-1])))), (path, p)) for path, p in flat)


def _transpose(path: tuple[Any, ...], x: Any) -> Any:
    """Transpose ``x`` if ``path`` leads to a flax kernel: a kernel is [in, out] and PyTorch's weight [out, in]."""
    return x.T if path[-1] == "kernel" else x


def _place(x: Any, old: jax.Array) -> jax.Array:
    """Return ``x`` in the dtype of ``old``, and with its sharding if ``old`` is committed to devices."""
    if getattr(old, "committed", False):
        return jax.device_put(np.asarray(x).astype(old.dtype), old.sharding)
    return jnp.asarray(x, old.dtype)


_NAMES = {"kernel": "weight", "embedding": "weight", "scale": "weight"}
