"""Weights as numpy arrays, under the same names and in the same orientation in both packages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ring_attn_core.model.weight_names import check_state

from ..attend.tiles import accumulation_dtype

Module = TypeVar("Module", bound=nnx.Module)


def to_numpy(module: nnx.Module) -> dict[str, np.ndarray]:
    """The parameters of a module as copies in numpy, by dotted name, such as ``blocks.0.attention.q.weight`` [out, in].

    bfloat16 and float16 come as float32. ``from_numpy`` of either package reads them.
    """
    state = {}
    for name, (path, p) in _parameters(module).items():
        state[name] = _turned(path, np.array(p[...], accumulation_dtype(p.dtype)))
    return state


def from_numpy(module: Module, state: Mapping[str, np.ndarray]) -> Module:
    """Set the parameters of ``module``, each in its own dtype, to what ``to_numpy`` of either package gave; returns ``module``.

    A parameter that was put on the devices of a mesh stays sharded as it is. Raises ValueError that lists what is missing,
    unexpected or of another shape, and then changes nothing.
    """
    parameters = _parameters(module)
    check_state(
        {name: _turned(path, p[...]).shape for name, (path, p) in parameters.items()},
        {name: np.shape(x) for name, x in state.items()},
    )
    flat = [(path, p.replace(_placed(_turned(path, state[name]), p[...]))) for name, (path, p) in parameters.items()]
    nnx.update(module, nnx.from_flat_state(flat))
    return module


def _parameters(module: nnx.Module) -> dict[str, tuple[tuple[Any, ...], Any]]:
    """By the name that PyTorch would give: the path in flax and the variable."""
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {".".join(map(str, (*path[:-1], _NAMES.get(str(path[-1]), path[-1])))): (path, p) for path, p in flat}


def _turned(path: tuple[Any, ...], x: Any) -> Any:
    """A flax kernel is PyTorch's weight transposed."""
    return x.T if path[-1] == "kernel" else x


def _placed(x: Any, old: jax.Array) -> jax.Array:
    """``x`` in the dtype of ``old``, and on its devices if somebody has put it there."""
    if getattr(old, "committed", False):
        return jax.device_put(np.asarray(x).astype(old.dtype), old.sharding)
    return jnp.asarray(x, old.dtype)


_NAMES = {"kernel": "weight", "embedding": "weight", "scale": "weight"}
"""What flax calls a module's weight."""
