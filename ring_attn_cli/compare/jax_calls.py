"""The calls of the variants in JAX, such as ``ring``.

A call takes a ``JaxCall`` and builds a function that maps a rank's arrays to its results, both as dicts by name. The function
runs inside the ring's shard_map. Other packages are called as their documentation says, in their own layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from ring_attn_jax import RingAttention, RingTransformer, dilated_attention, loss, ring_attention, summary_attention

from . import user as users
from .jax_side import JaxCall
from .oracles import DEPTH, VOCAB

Arrays = dict[str, jax.Array]
Function = Callable[[Arrays], Arrays]


def options(call: JaxCall) -> dict[str, Any]:
    """Return the arguments of ring_attention that the case sets and that are not arrays."""
    case = call.case
    names = ("layout", "strategy", "backend")
    return {name: getattr(case, name) for name in names} | case.scalars | {"mask": case.band, "length": case.length}


def ring(call: JaxCall) -> Function:
    def attention(arrays: Arrays) -> Arrays:
        out, lse = ring_attention(**arrays, **options(call), axis_name=call.axis_name, return_lse=True)
        return {"out": out, "lse": lse}

    return attention


def dilated(call: JaxCall) -> Function:
    case = call.case
    own = {"segments": case.segments, "dilations": case.dilations, "mixing": case.mixing, "mask": case.band}

    def attention(arrays: Arrays) -> Arrays:
        out, lse = dilated_attention(**arrays, **own, **_variant(call), axis_name=call.axis_name, return_lse=True)
        return {"out": out, "lse": lse}

    return attention


def summary(call: JaxCall) -> Function:
    case = call.case
    own = {"block": case.block, "summaries": case.summaries, "window": case.window}

    def attention(arrays: Arrays) -> Arrays:
        out, lse = summary_attention(**arrays, **own, **_variant(call), axis_name=call.axis_name, return_lse=True)
        return {"out": out, "lse": lse}

    return attention


def _variant(call: JaxCall) -> dict[str, Any]:
    """Return the case's arguments, except arrays, that dilated_attention and summary_attention share."""
    return {name: getattr(call.case, name) for name in ("scale", "softcap", "length", "strategy", "backend")}


def layer(call: JaxCall) -> Function:
    case = call.case
    dim = case.heads * case.head_dim
    module = RingAttention(dim, case.heads, **_heads(call), dropout_rate=case.dropout_rate, rngs=nnx.Rngs(0))
    seed = {"dropout_seed": case.seed} if case.dropout_rate else {}

    def apply(arrays: Arrays) -> Arrays:
        loaded, masks = _loaded(module, arrays)
        x = masks.pop("x")
        return {"out": loaded(x, length=case.length, **masks, **seed)}

    return apply


def transformer(call: JaxCall) -> Function:
    case = call.case
    dim = case.heads * case.head_dim
    module = RingTransformer(VOCAB, dim, DEPTH, case.heads, hidden=2 * dim, **_heads(call), rngs=nnx.Rngs(0))

    def apply(arrays: Arrays) -> Arrays:
        loaded, masks = _loaded(module, arrays)
        ids, labels = masks.pop("ids"), masks.pop("labels")
        logits = loaded(ids, length=case.length, **masks)
        return {"logits": logits, "loss": loss(logits, labels, axis_name=call.axis_name)}

    return apply


def _heads(call: JaxCall) -> dict[str, Any]:
    """Return the constructor arguments that the case sets for both RingAttention and RingTransformer."""
    case = call.case
    names = ("kv_heads", "head_dim", "layout", "softcap", "sinks", "alibi", "strategy", "backend")
    dtype = "float64" if case.dtype == "float64" else "float32"
    own = {"mask": case.band, "param_dtype": dtype, "axis_name": call.axis_name}
    return {name: getattr(case, name) for name in names} | own


WEIGHTS = {"kernel": "weight", "embedding": "weight", "scale": "weight"}
"""Flax's names of weights, and PyTorch's names for them; a flax kernel is PyTorch's weight transposed."""


def _loaded(module: Any, arrays: Arrays) -> tuple[Any, Arrays]:
    """Return a copy of ``module`` with its weights, named as by ``to_numpy``, from ``arrays``, and the other arrays."""
    graph, state = nnx.split(module, nnx.Param)
    others, flat = dict(arrays), []
    for path, p in nnx.to_flat_state(state):
        weight = others.pop(".".join(map(str, (*path[:-1], WEIGHTS.get(str(path[-1]), path[-1])))))
        flat.append((path, p.replace(weight.T if path[-1] == "kernel" else weight)))
    return nnx.merge(graph, nnx.from_flat_state(flat)), others


def user(call: JaxCall) -> Function:
    text = call.user or ""
    function = users.load(text)
    names = ("extents", "key_mask", "sinks", "alibi_slopes")
    drops = {"dropout_rate": call.case.dropout_rate, "dropout_seed": call.case.seed if call.case.dropout_rate else None}
    own = {"axis_name": call.axis_name, "return_lse": True, "deterministic": False}
    fixed = options(call) | drops | {"scale": call.case.factor} | own

    def attention(arrays: Arrays) -> Arrays:
        offered = fixed | {name: arrays.get(name) for name in names}
        arguments = users.taken(function, text, offered, call.case)
        users.check_length(text, arguments, call.case, call.plan.seq_local * call.plan.ranks)
        return users.called(function, text, arrays, arguments)

    return attention


def ringattention(call: JaxCall) -> Function:
    """Return a function that calls the package ringattention, on contiguous shards with one query and one key chunk per rank."""
    import jax.numpy as jnp
    from ringattention import ringattention_jax as attend  # pyright: ignore[reportMissingImports]

    case, local = call.case, call.plan.seq_local
    chunks = {"query_chunk_size": local, "key_chunk_size": local, "causal_block_size": 1 if case.mask == "causal" else None}
    how = chunks | {"deterministic": True, "dropout_rng": None, "attn_pdrop": 0.0, "dtype": jnp.float32, "precision": None}
    how |= {"policy": jax.checkpoint_policies.nothing_saveable, "prevent_cse": True}

    def attention(arrays: Arrays) -> Arrays:
        q, k, v = (arrays[name] for name in "qkv")
        return {"out": attend(q, k, v, None, None, None, call.axis_name, True, how)}

    attention.check_vma = False  # its backward does not track varying axes
    return attention
