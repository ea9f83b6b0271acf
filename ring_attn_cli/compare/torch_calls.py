"""The calls of variants that PyTorch alone has. Other packages are called as their documentation says, in their own layout."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ring_attn_core.reference.oracle import visible
from ring_attn_torch import ring_attention

from .calls import set_options
from .worker import Arrays, Call, Function


def build_vendor(call: Call) -> Function:
    """Return a call with a vendor's kernels, without lse among its results, because these kernels do not differentiate lse."""
    options = set_options(call)
    return lambda arrays: {"out": ring_attention(**arrays, **options)}


def build_sdpa(call: Call) -> Function:
    """Return the call of torch's scaled_dot_product_attention on one device, with ``is_causal`` or else a dense mask."""
    case, seen = call.case, None
    if case.mask not in ("causal", "full") or case.masks:
        tokens = range(case.length)
        seen = torch.tensor(visible(case.band, tokens, tokens, **case.masks)[:, None], device=call.device)
    options = {"is_causal": seen is None and case.mask == "causal", "scale": case.factor}

    def attention(arrays: Arrays) -> Arrays:
        q, k, v = (arrays[name].transpose(1, 2) for name in "qkv")
        out = F.scaled_dot_product_attention(q, k, v, seen, **options, enable_gqa=case.heads != case.kv_heads)
        return {"out": out.transpose(1, 2)}

    return attention


def build_context_parallel(call: Call) -> Function:
    """Return the call of PyTorch's experimental context parallelism, with its load balancing (zigzag)."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel as parallel
    from torch.distributed.tensor.experimental._attention import _cp_options

    case, grouped = call.case, call.case.heads // call.case.kv_heads
    mesh = DeviceMesh.from_group(call.ring["group"], call.device.type)
    _cp_options.enable_load_balance = True

    def attention(arrays: Arrays) -> Arrays:
        q, k, v = (arrays[name].transpose(1, 2) for name in "qkv")
        k, v = (x.repeat_interleave(grouped, 1) for x in (k, v))
        return {"out": F.scaled_dot_product_attention(q, k, v, is_causal=case.mask == "causal").transpose(1, 2)}

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
