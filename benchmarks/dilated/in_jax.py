"""The measurement in JAX: one process with a mesh of all devices."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import NamedSharding, P

from ring_attn_jax import sharded_dilated_attention, sharded_ring_attention

from .problem import Problem


def run(problem: Problem, ranks: int) -> dict[str, Any]:
    mesh = jax.make_mesh((ranks,), ("seq",))
    shape = 1, problem.tokens, problem.heads, problem.head_dim
    draw = jax.jit(lambda key: jax.random.normal(key, shape, problem.dtype), out_shardings=NamedSharding(mesh, P(None, "seq")))
    q, k, v, dout = map(draw, jax.random.split(jax.random.key(0), 4))
    patterns = {"segments": problem.segments, "dilations": problem.dilations}
    works = {
        "dilated": partial(sharded_dilated_attention, mesh=mesh, **patterns),
        "exact": partial(sharded_ring_attention, mesh=mesh, layout="zigzag"),
    }
    found: dict[str, Any] = {}
    for name, steps in (("dilated", 2), ("exact", problem.exact_steps), ("dilated", problem.steps)):
        if steps:
            found[name] = _steps(works[name], (q, k, v), dout, steps + 1)
    return found


def _steps(work: Callable[..., jax.Array], inputs: tuple[jax.Array, ...], dout: jax.Array, steps: int) -> dict[str, Any]:
    """Return the seconds of each step after the first, XLA's planned peak bytes, and whether all results are finite.

    Keys: "forward" is the forward alone, "both" forward and backward, "first" the first step of both.
    """

    def step(inputs: tuple[jax.Array, ...], dout: jax.Array) -> Any:
        out, back = jax.vjp(work, *inputs)
        return out, back(dout)

    alone, both = jax.jit(lambda inputs: work(*inputs)), jax.jit(step)
    finite = jax.jit(lambda results: jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(results)]).all())
    program = both.lower(inputs, dout).compile()
    analysis = program.memory_analysis()
    forward, whole, well = [], [], True
    for _ in range(steps):
        began = time.perf_counter()
        jax.block_until_ready(alone(inputs))
        forward.append(time.perf_counter() - began)
        began = time.perf_counter()
        results = jax.block_until_ready(program(inputs, dout))
        whole.append(time.perf_counter() - began)
        well = well and bool(finite(results))
    peak = analysis.temp_size_in_bytes + analysis.output_size_in_bytes if analysis else 0
    return {"forward": forward[1:], "both": whole[1:], "first": whole[0], "finite": well, "peak": peak}
