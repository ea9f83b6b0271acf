"""A call of the kernels on one GPU and random inputs for it, for timing launches instead of public functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ring_attn_core import Band
from ring_attn_core.kernels.call import RingCall
from ring_attn_core.kernels.portable import launches as portable
from ring_attn_core.plan.ring import RingPlan
from ring_attn_torch.attend.launch import capability, launch

TOKENS = 16384
HEADS = {128: 16, 64: 32, 256: 8, 512: 4}


def the_call(dim: int, device: torch.device, tokens: int = TOKENS, **features: Any) -> RingCall:
    """Return the call of a ring of one with heads of ``dim``. ``features``: fields of the RingCall."""
    shape = {"batch": 1, "seq_local": tokens, "kv_local": tokens, "heads": HEADS[dim], "kv_heads": HEADS[dim]}
    of_ring = {
        "q_runs": 1,
        "k_runs": 1,
        "packed": False,
        "aligned": True,
        "zero_masked": False,
        "fully_masked": False,
        "tf32": False,
    }
    plain = {"softcap": None, "dropout_rate": 0.0, "array_names": frozenset()} | features
    dims = {"head_dim": dim, "v_dim": dim, "dtype": "bfloat16", "scale": dim**-0.5}
    return RingCall(**shape, **of_ring, **plain, **dims, capability=capability(device))


def arrays(call: RingCall, device: torch.device, band: Band, hidden: float = 0.1) -> dict[str, Tensor]:
    """Draw random inputs by name for the mask ``band``. ``hidden``: the fraction of keys that the key mask masks."""
    tokens = call.seq_local
    generator = torch.Generator(device).manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, device=device, generator=generator)
    made = {name: normal(1, tokens, call.heads, call.head_dim).bfloat16() for name in ("q", "k", "v", "dout")}
    made["lse2"] = torch.full((1, call.heads, tokens), 14.0, device=device)
    made["delta"] = normal(1, call.heads, tokens)
    made["rows"] = torch.tensor(RingPlan("contiguous", band, 1, tokens).rows(0, 0), dtype=torch.int32, device=device)
    draw = torch.tensor([7, 0, 0, 0], dtype=torch.int32, device=device).view(torch.uint32)
    (made["dropout"],) = launch(portable.philox_keys(1, call.heads), {"dropout_seed": draw})
    seen = torch.rand(tokens // 8, 8, device=device, generator=generator) >= hidden
    bits = (seen.int() << torch.arange(8, device=device)).sum(-1).to(torch.uint8)
    made["key_mask"], made["key_mask_spans"] = launch(portable.unpack_key_mask(1, tokens), {"key_mask_bits": bits[None]})
    return made
