"""What travels round the ring: keys and values in one array, and the key mask as bits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Keys(NamedTuple):
    """``kv`` [b t g d+e]: k, then v on the last dimension. ``bits`` uint8 [b, ceil(t / 8)]: bit j % 8 of byte j // 8 says whether
    key j may be attended; None where all may."""

    kv: Tensor
    bits: Tensor | None = None


def pack(k: Tensor, v: Tensor, key_mask: Tensor | None = None) -> Keys:
    """k [b t g d], v [b t g e], key_mask bool [b t]."""
    kv = torch.cat([k, v], -1).contiguous()  # it takes over the order of dimensions in memory that k and v share
    if key_mask is None:
        return Keys(kv)
    b, t = key_mask.shape
    whole = torch.cat([key_mask, key_mask.new_zeros(b, -t % 8)], 1).unflatten(1, (-(-t // 8), 8))
    return Keys(kv, (whole << _bit(whole)).sum(-1).to(torch.uint8))


def unpack(keys: Keys) -> Tensor | None:
    """The key mask: bool [b t], None where every key may be attended."""
    if keys.bits is None:
        return None
    bits = keys.bits[..., None] >> _bit(keys.bits) & 1
    return bits.flatten(1)[:, : keys.kv.shape[1]].bool()


def _bit(x: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=x.device)
