"""The calls of the variants. Each function builds a variant's function from a ``Call``, and imports the packages it calls."""

from __future__ import annotations

from typing import Any

from ring_attn_core.reference.oracle import visible

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


def build_vendor(call: Call) -> Function:
    """Return a call with a vendor's kernels, without lse among its results, because these kernels do not differentiate lse."""
    options = set_options(call)
    return lambda arrays: {"out": call.library.ring_attention(**arrays, **options)}


def build_sdpa(call: Call) -> Function:
    import torch

    case, seen, attend = call.case, None, torch.nn.functional.scaled_dot_product_attention
    if case.mask not in ("causal", "full") or case.masks:
        tokens = range(case.length)
        seen = torch.tensor(visible(case.band, tokens, tokens, **case.masks)[:, None], device=call.device)
    options = {"is_causal": seen is None and case.mask == "causal", "scale": case.factor}

    def attention(arrays: Arrays) -> Arrays:
        q, k, v = (arrays[name].transpose(1, 2) for name in "qkv")
        out = attend(q, k, v, seen, **options, enable_gqa=case.heads != case.kv_heads)
        return {"out": out.transpose(1, 2)}

    return attention


def build_context_parallel(call: Call) -> Function:
    """Return the call of PyTorch's experimental context parallelism, with its load balancing (zigzag)."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel as parallel
    from torch.distributed.tensor.experimental._attention import _cp_options

    case, grouped = call.case, call.case.heads // call.case.kv_heads
    mesh = DeviceMesh.from_group(call.ring["group"], call.device.type)
    attend = torch.nn.functional.scaled_dot_product_attention
    _cp_options.enable_load_balance = True

    def attention(arrays: Arrays) -> Arrays:
        q, k, v = (arrays[name].transpose(1, 2) for name in "qkv")
        k, v = (x.repeat_interleave(grouped, 1) for x in (k, v))
        return {"out": attend(q, k, v, is_causal=case.mask == "causal").transpose(1, 2)}

    def within() -> Any:
        # The context shards global buffers in place. This rank's arrays are sharded already, so it gets a dummy buffer.
        return parallel(mesh, buffers=[torch.zeros(1, 1, case.length, 1, device=call.device)], buffer_seq_dims=[2])

    attention.within = within
    return attention


def build_ring_flash_attn(call: Call) -> Function:
    from ring_flash_attn import zigzag_ring_flash_attn_func as attend  # pyright: ignore[reportMissingImports]

    options = {"softmax_scale": call.case.factor, "causal": True} | call.ring
    return lambda arrays: {"out": attend(*(arrays[name] for name in "qkv"), **options)}


def build_ring_attention_pytorch(call: Call) -> Function:
    """Return the call of the package ring-attention-pytorch; its ring is striped if causal, and in the default group."""
    from ring_attention_pytorch import ring_flash_attn as attend  # pyright: ignore[reportMissingImports]

    options: dict[str, Any] = {"causal": call.case.mask == "causal"}
    if (ranks := call.plan.ranks) > 1:
        options |= {"ring_reduce_col": True, "striped_ring_attn": options["causal"], "ring_size": ranks}
        options["bucket_size"] = call.plan.seq_local
    return lambda arrays: {"out": attend(*(arrays[name] for name in "qkv"), **options)}


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
