"""Runs a problem of parity_tests/support/decode.py on the JAX ring."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ring_attn_jax import tree_attention_decode

from ..support.decode import Problem, Shape
from .ring import QUICK, mesh_of

OF_CACHE = "k", "v", "k_positions"
SLOTS = PartitionSpec(None, "seq")


def run(problem: Problem, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """out and lse, which the program says are the same on all ranks."""
    with jax.enable_x64(problem.shape.dtype == "float64"):
        results = program(problem.shape, tuple(options.items()))(arrays(problem))
        return tuple(np.asarray(x.astype(jnp.promote_types(x.dtype, jnp.float32))) for x in results)  # type: ignore[return-value]


def arrays(problem: Problem) -> dict[str, jax.Array]:
    """The arguments, the slots of all ranks side by side."""
    dtype = jnp.dtype(problem.shape.dtype)
    in_cache = jnp.float8_e4m3fn if "fp8" in problem.shape.features else dtype
    kinds = {"q": dtype, "k": in_cache, "v": in_cache}
    whole = {name: np.concatenate(list(x), 1) if name in OF_CACHE else x for name, x in problem.arrays.items()}
    return {name: jnp.asarray(x).astype(kinds.get(name, x.dtype)) for name, x in whole.items()}


@lru_cache(maxsize=256)
def program(shape: Shape, options: tuple[tuple[str, Any], ...] = ()) -> Callable[[dict[str, jax.Array]], Any]:
    """Return a function of the arguments by name, compiled once for every shape."""
    names = list(Problem(shape).arrays)
    specs = ({name: SLOTS if name in OF_CACHE else PartitionSpec() for name in names},)
    decode = lambda given: tree_attention_decode(**given, **shape.options, **dict(options), return_lse=True)
    ring = jax.shard_map(decode, mesh=mesh_of(shape.ranks), in_specs=specs, out_specs=PartitionSpec())
    return jax.jit(ring, compiler_options=QUICK if jax.default_backend() == "cpu" else None)
