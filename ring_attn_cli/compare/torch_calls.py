"""The calls of the variants in PyTorch, such as ``ring``.

A call takes a ``TorchCall`` and builds a function that maps a rank's arrays to its results, both as dicts by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ring_attn_torch import RingAttention, RingTransformer, dilated_attention, loss, ring_attention, summary_attention

from . import user as users
from .torch_side import TorchCall

Tensors = dict[str, Tensor]
Function = Callable[[Tensors], Tensors]


def options(call: TorchCall) -> dict[str, Any]:
    """Return the arguments of ring_attention that the case sets and that are not arrays."""
    case = call.case
    names = ("layout", "strategy", "backend")
    return {name: getattr(case, name) for name in names} | case.scalars | {"mask": case.band, "length": case.length}


def ring(call: TorchCall) -> Function:
    def attention(arrays: Tensors) -> Tensors:
        out, lse = ring_attention(**arrays, **options(call), group=call.group, return_lse=True)
        return {"out": out, "lse": lse}

    return attention


def vendor(call: TorchCall) -> Function:
    """Return a call with a vendor's kernels, without lse among its results, because these kernels do not differentiate lse."""
    return lambda arrays: {"out": ring_attention(**arrays, **options(call), group=call.group)}


def dilated(call: TorchCall) -> Function:
    case = call.case
    own = {"segments": case.segments, "dilations": case.dilations, "mixing": case.mixing, "mask": case.band}

    def attention(arrays: Tensors) -> Tensors:
        out, lse = dilated_attention(**arrays, **own, **_variant(call), group=call.group, return_lse=True)
        return {"out": out, "lse": lse}

    return attention


def summary(call: TorchCall) -> Function:
    case = call.case
    own = {"block": case.block, "summaries": case.summaries, "window": case.window}

    def attention(arrays: Tensors) -> Tensors:
        out, lse = summary_attention(**arrays, **own, **_variant(call), group=call.group, return_lse=True)
        return {"out": out, "lse": lse}

    return attention


def _variant(call: TorchCall) -> dict[str, Any]:
    """Return the case's arguments, except arrays, that dilated_attention and summary_attention share."""
    return {name: getattr(call.case, name) for name in ("scale", "softcap", "length", "strategy", "backend")}


def layer(call: TorchCall) -> Function:
    case = call.case
    dim = case.heads * case.head_dim
    module = RingAttention(dim, case.heads, **_heads(call), dropout_rate=case.dropout_rate, group=call.group).to(call.device)

    def apply(arrays: Tensors) -> Tensors:
        masks, weights = _split(arrays, module)
        seed = {"dropout_seed": case.seed} if case.dropout_rate else {}
        x = masks.pop("x")
        return {"out": torch.func.functional_call(module, weights, (x,), {"length": case.length, **masks, **seed})}

    return apply


def transformer(call: TorchCall) -> Function:
    case = call.case
    dim = case.heads * case.head_dim
    from .oracles import DEPTH, VOCAB

    module = RingTransformer(VOCAB, dim, DEPTH, case.heads, hidden=2 * dim, **_heads(call), group=call.group).to(call.device)

    def apply(arrays: Tensors) -> Tensors:
        masks, weights = _split(arrays, module)
        ids, labels = masks.pop("ids"), masks.pop("labels")
        logits = torch.func.functional_call(module, weights, (ids,), {"length": case.length, **masks})
        return {"logits": logits, "loss": loss(logits, labels, group=call.group)}

    return apply


def _heads(call: TorchCall) -> dict[str, Any]:
    """Return the constructor arguments that the case sets for both RingAttention and RingTransformer."""
    case = call.case
    names = ("kv_heads", "head_dim", "layout", "softcap", "sinks", "alibi", "strategy", "backend")
    dtype = "float64" if case.dtype == "float64" else "float32"
    return {name: getattr(case, name) for name in names} | {"mask": case.band, "param_dtype": dtype}


def _split(arrays: Tensors, module: torch.nn.Module) -> tuple[Tensors, Tensors]:
    """Return the ``arrays`` that are not weights of ``module``, and those that are."""
    names = {name for name, _ in module.named_parameters()}
    return {n: x for n, x in arrays.items() if n not in names}, {n: x for n, x in arrays.items() if n in names}


def user(call: TorchCall) -> Function:
    text = call.user or ""
    function = users.load(text)
    names = ("extents", "key_mask", "sinks", "alibi_slopes")
    drops = {"dropout_rate": call.case.dropout_rate, "dropout_seed": call.case.seed if call.case.dropout_rate else None}
    fixed = options(call) | drops | {"scale": call.case.factor, "group": call.group, "return_lse": True, "deterministic": False}

    def attention(arrays: Tensors) -> Tensors:
        offered = fixed | {name: arrays.get(name) for name in names}
        arguments = users.taken(function, text, offered, call.case)
        users.check_length(text, arguments, call.case, call.plan.seq_local * call.plan.ranks)
        return users.called(function, text, arrays, arguments)

    return attention


def sdpa(call: TorchCall) -> Function:
    """Return the call of torch's scaled_dot_product_attention on one device, with ``is_causal`` or else a dense mask."""
    case = call.case
    band, where = case.band, torch.arange(case.length, device=call.device)
    lag = where[:, None] - where

    def attention(arrays: Tensors) -> Tensors:
        q, k, v = (arrays[name].transpose(1, 2) for name in "qkv")
        plain = case.mask in ("causal", "full") and not case.masks
        seen = None
        if not plain:
            seen = torch.ones_like(lag, dtype=torch.bool)[None]
            seen = seen if band.lo is None else seen & (lag >= band.lo)
            seen = seen if band.hi is None else seen & (lag <= band.hi)
            if "extents" in arrays:
                first, end = arrays["extents"][..., None].unbind(2)
                seen = seen & (first <= where) & (where < end)
            if "key_mask" in arrays:
                seen = seen & arrays["key_mask"][:, None]
            seen = seen[:, None]
        causal = plain and case.mask == "causal"
        grouped = case.heads != case.kv_heads
        out = F.scaled_dot_product_attention(q, k, v, seen, is_causal=causal, scale=case.factor, enable_gqa=grouped)
        return {"out": out.transpose(1, 2)}

    return attention


def context_parallel(call: TorchCall) -> Function:
    """Return the call of PyTorch's experimental context parallelism, with its load balancing (zigzag)."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel as parallel
    from torch.distributed.tensor.experimental._attention import _cp_options

    case, grouped = call.case, call.case.heads // call.case.kv_heads
    mesh = DeviceMesh.from_group(call.group, call.device.type)
    _cp_options.enable_load_balance = True

    def attention(arrays: Tensors) -> Tensors:
        q, k, v = (arrays[name].transpose(1, 2) for name in "qkv")
        k, v = (x.repeat_interleave(grouped, 1) for x in (k, v))
        return {"out": F.scaled_dot_product_attention(q, k, v, is_causal=case.mask == "causal").transpose(1, 2)}

    def within() -> Any:
        # The context shards global buffers in place. This rank's arrays are sharded already, so it gets a dummy buffer.
        return parallel(mesh, buffers=[torch.zeros(1, 1, case.length, 1, device=call.device)], buffer_seq_dims=[2])

    attention.within = within
    return attention


def ring_flash_attn(call: TorchCall) -> Function:
    from ring_flash_attn import zigzag_ring_flash_attn_func  # pyright: ignore[reportMissingImports]

    def attention(arrays: Tensors) -> Tensors:
        q, k, v = (arrays[name] for name in "qkv")
        return {"out": zigzag_ring_flash_attn_func(q, k, v, softmax_scale=call.case.factor, causal=True, group=call.group)}

    return attention


def ring_attention_pytorch(call: TorchCall) -> Function:
    """Return the call of the package ring-attention-pytorch; its ring is striped if causal, and in the default group."""
    from ring_attention_pytorch import ring_flash_attn as attend  # pyright: ignore[reportMissingImports]

    causal, ranks = call.case.mask == "causal", call.plan.ranks

    def attention(arrays: Tensors) -> Tensors:
        q, k, v = (arrays[name] for name in "qkv")
        how: dict[str, Any] = {}
        if ranks > 1:
            how = {"bucket_size": q.shape[1], "ring_reduce_col": True, "striped_ring_attn": causal, "ring_size": ranks}
        return {"out": attend(q, k, v, causal=causal, **how)}

    return attention
