"""The tensors of a key shard, which travel between ranks: packed k and v, the key mask as bits, and the key extents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_attn_core.kernels.call import BEYOND


class Keys(NamedTuple):
    """A shard of keys and values. ``kv`` [b t g d+e] holds both, or k alone [b t g d] if ``v`` [b t g e] or k has the values.
    ``bits`` uint8 [b, ceil(t / 8)]: bit j % 8 of byte j // 8 is 1 if key j may be attended. ``extents`` int32 [b t 2]: the first
    and the end of the query positions (``one_run.py``: local indices) that may see a key."""

    kv: Tensor
    bits: Tensor | None = None
    v: Tensor | None = None
    extents: Tensor | None = None


def pack(
    k: Tensor, v: Tensor | None, key_mask: Tensor | None = None, key_extents: Tensor | None = None, two_arrays: bool = False
) -> Keys:
    """Pack k [b t g d], v [b t g e] (None: columns of k), key_mask bool [b t] and key_extents int [b t 2]. Masked keys and values
    become 0, even NaN; extents are clipped to 0 .. ``BEYOND``."""
    # If k and v are transposed alike in memory, cat returns a transposed array too; kernels need a contiguous one.
    arrays = [k.contiguous()] if v is None else [k, v] if two_arrays else [torch.cat([k, v], -1).contiguous()]
    bits = None
    if key_mask is not None:
        arrays = [zero_where(x, ~key_mask[..., None, None]) for x in arrays]
        bits = bits_of(key_mask)
    return Keys(arrays[0], bits, arrays[1] if len(arrays) == 2 else None, None if key_extents is None else clip(key_extents))


def bits_of(key_mask: Tensor) -> Tensor:
    """Pack a key mask, bool [b t], into uint8 [b, ceil(t / 8)], the ``bits`` of ``Keys``."""
    whole = torch.cat([key_mask, key_mask.new_zeros(len(key_mask), -key_mask.shape[1] % 8)], 1)
    whole = whole.unflatten(1, (whole.shape[1] // 8, 8))
    return (whole << _bit(whole)).sum(-1).to(torch.uint8)


def clip(extents: Tensor) -> Tensor:
    """Return extents [b n 2] of any integer dtype as int32, clipped to 0 .. ``BEYOND``."""
    return (extents if extents.dtype == torch.int32 else extents.long()).clamp(0, BEYOND).int()


def zero_where(x: Tensor, where: Tensor) -> Tensor:
    """Return x [b s h d] with 0 at each element, even NaN, where the mask [b s h 1] is True. View the data as 8-byte elements if
    aligned, because masked_fill of 2-byte elements is slow."""
    places = x.shape[-1], x.storage_offset(), *x.stride()[:-1]
    whole = x.numel() > 0 and x.is_contiguous() and x.data_ptr() % 8 == 0 and all(n * x.element_size() % 8 == 0 for n in places)
    return torch.where(where, 0, x.view(torch.int64)).view(x.dtype) if whole else x.masked_fill(where, 0)


def unpack(keys: Keys) -> Tensor | None:
    """Unpack the key mask, bool [b t], from its bits. Return None without a key mask."""
    return None if keys.bits is None else _mask_of(keys.bits, keys.kv.shape[1])


def join(parts: Keys, tokens: int) -> Keys:
    """Concatenate shards of ``tokens`` tokens. Each array of ``parts`` stacks all shards, [shards b ...]; k and v are packed."""
    bits = parts.bits
    if bits is not None:
        masks = None if tokens % 8 == 0 else [_mask_of(each, tokens) for each in bits]
        bits = side_by_side(bits) if masks is None else bits_of(torch.cat(masks, 1))
    return Keys(side_by_side(parts.kv), bits, None, None if parts.extents is None else side_by_side(parts.extents))


def cut(keys: Keys, first: int, tokens: int) -> Keys:
    return along_tokens(lambda x: x[:, first : first + tokens].contiguous(), keys)


def along_tokens(function: Callable[[Tensor], Tensor], keys: Keys) -> Keys:
    """Apply ``function``, which selects tokens of arrays [b t ...], to each array of ``keys``."""
    part = _map(function, keys._replace(bits=unpack(keys)))
    return part if part.bits is None else part._replace(bits=bits_of(part.bits))


def room_for(keys: Keys, tokens: int) -> Keys:
    bits = None if keys.bits is None else keys.bits.new_empty(len(keys.bits), -(-tokens // 8))
    return _map(lambda x: x.new_empty(len(x), tokens, *x.shape[2:]), keys._replace(bits=None))._replace(bits=bits)


def place(parts: Sequence[tuple[int, Keys]], like: Keys) -> Keys:
    """Return keys shaped as ``like``: each part (first, keys) from token ``first`` on, other keys 0 (and masked)."""
    if len(parts) == 1 and parts[0][1].kv.shape == like.kv.shape:
        return parts[0][1]
    shard = _map(torch.zeros_like, like._replace(bits=unpack(like)))
    for first, part in parts:
        for x, new in zip(shard, part._replace(bits=unpack(part)), strict=True):
            if x is not None and new is not None:
                x[:, first : first + part.kv.shape[1]] = new
    return shard if shard.bits is None else shard._replace(bits=bits_of(shard.bits))


def side_by_side(x: Tensor) -> Tensor:
    """Concatenate shards along the tokens: [shards b n ...] to [b shards*n ...]."""
    return x.transpose(0, 1).flatten(1, 2)


def _map(function: Callable[[Tensor], Tensor], keys: Keys) -> Keys:
    arrays: list[Any] = [None if x is None else function(x) for x in keys]
    return Keys(*arrays)


def _mask_of(bits: Tensor, tokens: int) -> Tensor:
    each = bits[..., None] >> _bit(bits) & 1
    return each.flatten(1)[:, :tokens].bool()


def _bit(x: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=x.device)
