"""The calls in JAX: one process drives all ranks, or each of several processes its own."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import NamedSharding, P
from jax.experimental import multihost_utils

from ring_attn_jax import ring_attention
from ring_attn_jax.ring.strategies import ring as of_ring

from ..support.turns import Work, take_turns
from .problem import ALONE, STILL, TRAVELLING, Call, Problem, rates

SEQ = P(None, "seq")


class Ring:
    """The arrays and candidates of a call over ``ranks`` devices."""

    def __init__(self, call: Call, problem: Problem, ranks: int) -> None:
        self.call, self.ranks, self.dtype = call, ranks, jnp.dtype(problem.dtype)
        self.works: dict[str, Work] = {}
        self.flops = {}
        self.errors: dict[str, float] = {}
        self.first: jax.Array | None = None

    def arrays(self, mesh: jax.sharding.Mesh, tokens: int) -> list[jax.Array]:
        """Draw q, k, v and the cotangent of out."""
        call, there = self.call, NamedSharding(mesh, SEQ)
        heads = (call.heads, call.kv_heads, call.kv_heads, call.heads)
        draw = jax.jit(
            lambda key, heads: jax.random.normal(key, (1, tokens, heads, call.dim), jnp.float32).astype(self.dtype),
            static_argnums=1,
            out_shardings=there,
        )
        return [draw(key, each) for key, each in zip(jax.random.split(jax.random.key(0), 4), heads, strict=True)]

    def add(self, name: str, mesh: jax.sharding.Mesh, arrays: list[jax.Array], work: Call | None = None) -> None:
        """Add a candidate that calls ``ring_attention``, with the strategy ``name`` if there is one of this name."""
        call = work or self.call
        *inputs, dout = arrays
        strategy = TRAVELLING.get(name, "ring")
        layout = call.layout_of(self.ranks) if work is None else "zigzag"
        attend = partial(ring_attention, mask=call.band, layout=layout, strategy=strategy)
        extents = call.extents(self.ranks) if work is None else None
        if extents is None:
            ring = jax.shard_map(attend, mesh=mesh, in_specs=SEQ, out_specs=SEQ, check_vma=False)
        else:
            plan = call.plan(self.ranks)
            order = [extents[i] for rank in range(self.ranks) for i in plan.positions(rank)]
            given = jax.device_put(jnp.asarray([order], jnp.int32), NamedSharding(mesh, SEQ))
            inside = lambda q, k, v, extents: attend(q, k, v, extents=extents)
            with_extents = jax.shard_map(inside, mesh=mesh, in_specs=SEQ, out_specs=SEQ, check_vma=False)
            ring = lambda q, k, v: with_extents(q, k, v, given)
        forward = jax.jit(ring)
        out, vjp = jax.vjp(forward, *inputs)
        backward = jax.jit(lambda vjp, dout: vjp(dout))
        jax.block_until_ready(backward(vjp, dout))
        self.works[f"{name} forward"] = lambda: forward(*inputs)
        self.works[f"{name} backward"] = lambda: backward(vjp, dout)
        self.flops[name] = work.flops(1) if work else call.flops(self.ranks)
        if work is None and name != STILL:
            self.first = out if self.first is None else self.first
            norm = lambda x: jnp.linalg.norm(x.astype(jnp.float32).ravel())
            self.errors[name] = float(norm(out - self.first) / norm(self.first))


def slowest(seconds: float) -> float:
    """Return the seconds of the slowest process."""
    return float(multihost_utils.process_allgather(np.float32(seconds)).max())


def run(problem: Problem, ranks: int) -> list[dict[str, Any]]:
    """Return the rows of all calls."""
    found: list[dict[str, Any]] = []
    mesh, lone = jax.make_mesh((ranks,), ("seq",)), jax.make_mesh((1,), ("seq",), devices=jax.local_devices()[:1])
    for fields in problem.calls:
        call = Call(*fields)  # type: ignore[arg-type]
        ring = Ring(call, problem, ranks)
        arrays = ring.arrays(mesh, call.tokens * ranks)
        for name in problem.strategies(call, ranks, memory=False):
            ring.add(name, mesh, arrays)
        with mock.patch.object(of_ring, "send", lambda x, hop, axis, ranks: x):
            ring.add(STILL, mesh, arrays)
        same = call._replace(tokens=call.alone(ranks), mask="causal" if call.mask == "documents" else call.mask)
        ring.add(ALONE, lone, ring.arrays(lone, same.tokens), same)
        rows = rates(take_turns(ring.works, problem.rounds, slowest=slowest), ring.flops)
        found += [{"call": str(call), **row, "beside the ring": ring.errors.get(str(row["candidate"]), 0.0)} for row in rows]
    return found
