"""The calls of the variants of both frameworks and of JAX. Each function builds a variant's function from a ``Call``."""

from __future__ import annotations

from typing import Any

from . import user
from .oracles import DEPTH, VOCAB
from .worker import Arrays, Call, Function


def set_options(call: Call) -> dict[str, Any]:
    """Return the arguments of ring_attention that the case sets and that are not arrays."""
    return call.case.options | call.case.scalars | call.ring


def build_ring(call: Call) -> Function:
    options = set_options(call)
    return lambda arrays: _name(call.library.ring_attention(**arrays, **options, return_lse=True))


def build_dilated(call: Call) -> Function:
    options = _variant_options(call, "segments", "dilations", "mixing") | {"mask": call.case.band}
    return lambda arrays: _name(call.library.dilated_attention(**arrays, **options, return_lse=True))


def build_summary(call: Call) -> Function:
    options = _variant_options(call, "block", "summaries", "window")
    return lambda arrays: _name(call.library.summary_attention(**arrays, **options, return_lse=True))


def _variant_options(call: Call, *own: str) -> dict[str, Any]:
    shared = ("scale", "softcap", "length", "strategy", "backend")
    return {name: getattr(call.case, name) for name in (*shared, *own)} | call.ring


def _name(results: Any) -> Arrays:
    return dict(zip(("out", "lse"), results, strict=True))


def build_layer(call: Call) -> Function:
    case = call.case
    module = call.library.RingAttention(*_layer_size(call), dropout_rate=case.dropout_rate, **_layer_options(call))
    options = {"length": case.length} | ({"dropout_seed": case.seed} if case.dropout_rate else {})

    def apply(arrays: Arrays) -> Arrays:
        layer, others = call.bind(module, arrays)
        return {"out": layer(others.pop("x"), **options, **others)}

    return apply


def build_transformer(call: Call) -> Function:
    dim, heads = _layer_size(call)
    module = call.library.RingTransformer(VOCAB, dim, DEPTH, heads, hidden=2 * dim, **_layer_options(call))

    def apply(arrays: Arrays) -> Arrays:
        model, others = call.bind(module, arrays)
        ids, labels = others.pop("ids"), others.pop("labels")
        logits = model(ids, length=call.case.length, **others)
        return {"logits": logits, "loss": call.library.loss(logits, labels, **call.ring)}

    return apply


def _layer_size(call: Call) -> tuple[int, int]:
    return call.case.heads * call.case.head_dim, call.case.heads


def _layer_options(call: Call) -> dict[str, Any]:
    """Return the constructor arguments that the case sets for both RingAttention and RingTransformer."""
    case = call.case
    names = ("kv_heads", "head_dim", "layout", "softcap", "sinks", "alibi", "strategy", "backend")
    dtype = "float64" if case.dtype == "float64" else "float32"
    return {name: getattr(case, name) for name in names} | {"mask": case.band, "param_dtype": dtype} | call.make


def build_user(call: Call) -> Function:
    text, case = call.user or "", call.case
    function = user.load(text)
    fixed = {"dropout_seed": None} | set_options(call) | {"scale": case.factor, "return_lse": True, "deterministic": False}

    def attention(arrays: Arrays) -> Arrays:
        offered = fixed | {name: arrays.get(name) for name in ("extents", "key_mask", "sinks", "alibi_slopes")}
        arguments = user.take(function, text, offered, case)
        user.check_length(text, arguments, case, call.plan.seq_local * call.plan.ranks)
        return user.call(function, text, arrays, arguments)

    return attention


def build_ringattention(call: Call) -> Function:
    """Return a function that calls the package ringattention, on contiguous shards with one query and one key chunk per rank."""
    import jax
    from ringattention import ringattention_jax as attend  # pyright: ignore[reportMissingImports]

    case, local = call.case, call.plan.seq_local
    options = {"query_chunk_size": local, "key_chunk_size": local, "causal_block_size": 1 if case.mask == "causal" else None}
    options |= {"deterministic": True, "dropout_rng": None, "attn_pdrop": 0.0, "dtype": jax.numpy.float32, "precision": None}
    options |= {"policy": jax.checkpoint_policies.nothing_saveable, "prevent_cse": True}

    def attention(arrays: Arrays) -> Arrays:
        q, k, v = (arrays[name] for name in "qkv")
        return {"out": attend(q, k, v, None, None, None, call.ring["axis_name"], True, options)}

    attention.check_vma = False  # its backward does not track varying axes
    return attention
