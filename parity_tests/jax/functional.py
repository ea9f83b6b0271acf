"""Random calls of ring_attn_jax.functional: drawn, run over a mesh or on one device, and run by the original."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ring_attn_jax import functional, to_layout

from ..support.functional import Call, drawn_arrays, drawn_mask, fitting
from .ring import QUICK, REPLICATED, SEQ, mesh_of

BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 8
WINDOWS = ((3, 2), 4)
LENGTHS = "query_seq_lengths", "key_value_seq_lengths"
REFUSED = {"holes": "mask is neither a band", "heads": "mask differs between heads"}


@dataclass(frozen=True)
class Place:
    """The mesh and the shapes of a call: few, because each compiles programs of its own. ``ranks`` None: without a mesh."""

    ranks: int | None
    layout: str
    queries: int
    keys: int
    dtype: str = "float32"


PLACES = {
    None: (Place(None, "zigzag", 13, 13), Place(None, "zigzag", 13, 9, "float16")),
    2: (Place(2, "zigzag", 13, 13), Place(2, "contiguous", 13, 9, "bfloat16")),
    4: (Place(4, "striped", 13, 13), Place(4, "zigzag", 9, 13, "float16")),
}


def draw(seed: int, ranks: int | None) -> tuple[Call, Place, bool]:
    """One of many calls, its place, and whether its arrays are arguments of the jitted program, which calls then share."""
    rng, place = random.Random(seed), PLACES[ranks][seed % 2]
    sizes = BATCH, place.queries, place.keys, HEADS, KV_HEADS, HEAD_DIM
    arrays, shape = drawn_arrays(np.random.default_rng(seed), sizes, place.dtype), (place.queries, place.keys)
    call = Call("dot_product_attention", arrays, np.ones((1, *shape), bool), {}, place.dtype, place.layout)
    query, key, is_traced = np.arange(place.queries)[:, None], np.arange(place.keys), rng.random() < 0.75
    if rng.random() < 0.3:
        call.arguments |= {"scale": 0.3, "implementation": "xla"}
        call.scale = 0.3
    if rng.random() < 0.3:
        call.arguments["is_causal"] = True
        call.visible = call.visible & (key <= query)
    if rng.random() < 0.3:
        call.arguments["local_window_size"] = size = rng.choice(WINDOWS) if is_traced else (rng.randint(0, 5), rng.randint(-1, 5))
        left, right = size if isinstance(size, tuple) else (size, size)
        call.visible = call.visible & (query - left <= key) & (key <= query + right)
    for name, most, at in zip(LENGTHS, shape, (query, key), strict=True):
        few = rng.random() < 0.25
        if few or is_traced:
            call.arguments[name] = lengths = np.array([rng.randint(1, most) if few else most for _ in range(BATCH)], np.int32)
            call.visible = call.visible & (at < lengths[:, None, None])
    kind = fitting(rng, HEADS, *shape)
    if kind != "full" or is_traced:
        mask = drawn_mask(rng, kind, BATCH, HEADS, *shape)
        call.visible, call.refused = call.visible & mask[:, 0], REFUSED.get(kind)
        call.arguments["mask"] = np.broadcast_to(mask, (BATCH, HEADS, *shape)) if is_traced else mask
    if rng.random() < 0.1:
        name, call.refused = rng.choice((("bias", "bias would have to travel"), ("implementation", "implementation='cudnn'")))
        call.arguments[name] = "cudnn" if name == "implementation" else np.zeros((1, 1, *shape), np.float32)
        is_traced = False
    return call, place, is_traced


def parts(call: Call, is_traced: bool) -> tuple[tuple[tuple[str, Any], ...], dict[str, jax.Array]]:
    """Return the arguments that a program is made of, and those that it takes."""
    traced = {name for name in (*LENGTHS, *(("mask",) if is_traced else ())) if name in call.arguments}
    static = sorted((name, x) for name, x in call.arguments.items() if name not in traced)
    return tuple(static), {name: jnp.asarray(call.arguments[name]) for name in sorted(traced)}


def run(call: Call, place: Place, is_traced: bool) -> dict[str, np.ndarray]:
    """out, lse, dq, dk and dv as whole arrays in layout order, padding included."""
    static, taken = parts(call, is_traced)
    made = (program if is_traced else program.__wrapped__)(place, static)
    arrays = [jnp.asarray(call.arrays[name], call.dtype) for name in ("q", "k", "v", "dout")]
    if place.ranks is not None:
        arrays = [to_layout(x, place.layout, place.ranks, pad_value=jnp.nan) for x in arrays]
    results = made(*arrays, taken)
    return {name: np.asarray(x.astype(jnp.float32)) for name, x in zip(("out", "lse", "dq", "dk", "dv"), results, strict=True)}


@lru_cache
def program(place: Place, static: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    """Return a function of arrays in layout order and the traced arguments: out, lse, dq, dk and dv."""
    call = partial(functional.dot_product_attention, **dict(static), return_residual=True)
    if place.ranks is None:
        ours = lambda q, k, v, traced: call(q, k, v, axis_name=None, **traced)
    else:
        over = partial(call, layout=place.layout, length=place.queries, kv_length=place.keys)
        inside = lambda q, k, v, traced: over(q, k, v, **traced)
        specs = SEQ, SEQ, SEQ, REPLICATED
        ours = jax.shard_map(inside, mesh=mesh_of(place.ranks), in_specs=specs, out_specs=(SEQ, SEQ))

    def results(q, k, v, dout, traced):
        (out, lse), vjp = jax.vjp(lambda q, k, v: ours(q, k, v, traced), q, k, v)
        return out, lse, *vjp((dout, jnp.ones_like(lse)))  # JAX's residual has no gradient

    return jax.jit(results, compiler_options=QUICK if jax.default_backend() == "cpu" else None)


def original(call: Call, is_traced: bool) -> dict[str, np.ndarray]:
    """Return the results of JAX's own function for queries that see a key: for others it returns the mean of all values."""
    static, taken = parts(call, is_traced)
    seeing = np.broadcast_to(call.visible.any(2), (BATCH, call.lengths[0]))[..., None, None]
    q, k, v, dout = (jnp.asarray(call.arrays[name]) for name in ("q", "k", "v", "dout"))
    made = (originals if is_traced else originals.__wrapped__)(static)
    out, *gradients = made(q, k, v, jnp.where(seeing, dout, 0), taken)
    return {"out": np.where(seeing, out, 0), **dict(zip(("dq", "dk", "dv"), map(np.asarray, gradients), strict=True))}


@lru_cache
def originals(static: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    """Return JAX's own function with its gradients."""

    def results(q, k, v, dout, taken):
        out, vjp = jax.vjp(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **dict(static), **taken), q, k, v)
        return out, *vjp(dout)

    return jax.jit(results, compiler_options=QUICK if jax.default_backend() == "cpu" else None)
