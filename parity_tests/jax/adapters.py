"""Random calls of flax's attention modules: drawn, computed by flax's own attention and by the one over a mesh."""

from __future__ import annotations

import inspect
import random
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ring_attn_core import causal, full
from ring_attn_jax import attention_fn, from_layout, to_layout

from .ring import mesh_of

PLACES = [(1, "contiguous", 13, 13), (2, "contiguous", 13, 9), (4, "contiguous", 13, 13), (4, "zigzag", 16, 16)]
"""Ranks, layout, queries and keys: few, since each compiles a program for every kind of mask."""

MASKS = "none", "causal", "padding", "both paddings", "causal padding", "window", "documents", "two dims", "heads", "holes"
REFUSED = "heads", "holes"
BATCH, HEADS, FEATURES = 2, 4, 12

NEW_NNX = {"is_causal"} <= set(inspect.signature(nnx.MultiHeadAttention.__call__).parameters)
"""True if nnx.MultiHeadAttention takes is_causal and fewer key heads, as in newer versions of flax."""


@dataclass
class Draw:
    """A module of linen or nnx and a call of it, whole and in natural order."""

    kind: str
    linen: bool
    place: tuple[int, str, int, int]
    made: dict[str, Any]
    causal: str
    """The way to make the call causal: "" for none, "band" for attention_fn, "flag" for is_causal."""
    mask: np.ndarray | None
    visible: np.ndarray
    """bool [batch, queries, keys]: who sees whom, of the first head."""


def draw(seed: int) -> Draw:
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    kind = MASKS[seed % len(MASKS)]
    place = PLACES[seed // 2 % len(PLACES)]
    _, layout, queries, keys = place
    linen = layout == "contiguous" and rng.random() < 0.5
    made: dict[str, Any] = {"num_heads": HEADS, "qkv_features": 16, "use_bias": rng.random() < 0.5, "dropout_rate": 0.1}
    made |= {"out_features": rng.choice([12, 5]), "deterministic": True}
    how = rng.choice(["", "band", "flag"]) if kind in ("none", "padding") else ""
    how = "band" if how == "flag" and (linen or not NEW_NNX) else how
    if layout == "zigzag" and NEW_NNX:
        made["num_kv_heads"] = 2
    visible = _visible(kind, numbers, queries, keys)
    mask = {"none": None, "two dims": visible[0, 0]}.get(kind, visible)
    if mask is not None and rng.random() < 0.5:
        mask = mask.astype(np.float32)  # as nn.make_causal_mask makes them
    whole = np.broadcast_to(visible[:, 0], (BATCH, queries, keys))
    whole = whole & (np.tri(queries, keys, dtype=bool) if how else True)
    return Draw(kind, linen, place, made, how, mask, whole)


def _visible(kind: str, rng: np.random.Generator, queries: int, keys: int) -> np.ndarray:
    """bool [1 or batch, 1 or heads, 1 or queries, 1 or keys]: who sees whom."""
    causally, lag = np.tri(queries, keys, dtype=bool)[None, None], np.arange(queries)[:, None] - np.arange(keys)
    present, rows = rng.random((BATCH, 1, 1, keys)) < 0.7, rng.random((BATCH, 1, queries, 1)) < 0.7
    present[..., 0] = True
    return {
        "causal": causally,
        "padding": present,
        "both paddings": present & rows,
        "causal padding": causally & present,
        "window": (abs(lag) <= 4)[None, None] & present,
        "documents": ((np.arange(queries)[:, None] < 5) == (np.arange(keys) < 5))[None, None],
        "two dims": (lag <= 6)[None, None],
        "heads": rng.random((1, HEADS, 1, keys)) < 0.5,
        "holes": causally & ~((lag == 2) & (np.arange(keys) % 2 == 1))[None, None],
    }.get(kind, np.ones((1, 1, 1, 1), bool))


def flaxs_own(drawn: Draw) -> dict[str, np.ndarray]:
    """Output and gradients of the module as flax has it, told by its mask to be causal."""
    mask = drawn.mask
    if drawn.causal:
        triangle = np.tri(*drawn.place[2:], dtype=bool)[None, None]
        mask = triangle if mask is None else triangle & (mask != 0)
    return _results(drawn, {}, mask, {}, "contiguous", 1)


def over_a_mesh(drawn: Draw) -> dict[str, np.ndarray]:
    """The same with attention_fn, in natural order again."""
    ranks, layout, _, _ = drawn.place
    function = attention_fn(mesh=mesh_of(ranks), layout=layout, mask=causal() if drawn.causal == "band" else full())
    called = {"is_causal": True} if drawn.causal == "flag" else {}
    mask = drawn.mask
    if mask is not None and layout != "contiguous":
        for dim in (-2, -1):
            mask = np.asarray(to_layout(jnp.asarray(mask), layout, ranks, dim)) if mask.shape[dim] > 1 else mask
    return _results(drawn, {"attention_fn": function}, mask, called, layout, ranks)


def _results(
    drawn: Draw, more: dict[str, Any], mask: np.ndarray | None, called: dict[str, Any], layout: str, ranks: int
) -> dict[str, np.ndarray]:
    _, _, queries, keys = drawn.place
    rng = np.random.default_rng(8)
    there = lambda x: jnp.asarray(x) if layout == "contiguous" else to_layout(jnp.asarray(x), layout, ranks)
    back = lambda x: np.asarray(x if layout == "contiguous" else from_layout(x, layout, ranks, queries))
    inputs = [rng.standard_normal((BATCH, n, FEATURES)) for n in (queries, keys)]
    dout = rng.standard_normal((BATCH, queries, drawn.made["out_features"])) * drawn.visible.any(2)[..., None]
    forward, weights = _module(drawn, more)
    given = None if mask is None else jnp.asarray(mask)
    out, vjp = jax.vjp(lambda w, q, k: forward(w, q, k, mask=given, **called), weights, *map(there, inputs))
    gradients, *of_inputs = vjp(there(dout))
    named = {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(gradients)}
    return {"out": back(out) * drawn.visible.any(2)[..., None], "dq": back(of_inputs[0]), "dk": back(of_inputs[1]), **named}


def _module(drawn: Draw, more: dict[str, Any]) -> tuple[Any, Any]:
    """``forward(weights, query, key, **arguments)`` and weights in float64."""
    if drawn.linen:
        module = nn.MultiHeadDotProductAttention(**drawn.made, **more, param_dtype=jnp.float64)
        plain = nn.MultiHeadDotProductAttention(**drawn.made, param_dtype=jnp.float64)
        weights = plain.init(jax.random.key(0), *(jnp.ones((1, 1, FEATURES)),) * 2)
        return module.apply, weights
    module = nnx.MultiHeadAttention(
        in_features=FEATURES, **drawn.made, **more, decode=False, param_dtype=jnp.float64, rngs=nnx.Rngs(0)
    )
    graph, weights, rest = nnx.split(module, nnx.Param, ...)
    return lambda weights, *inputs, **arguments: nnx.merge(graph, weights, rest)(*inputs, **arguments), weights
