"""Attentions on a ring with a leak each, the same in JAX and in PyTorch: ``ring-attn compare --leak`` must find every one."""

from __future__ import annotations

import importlib
from typing import Any

TILE = 8
"""Tokens of a tile of :func:`future_key_in_the_last_tile`."""


def _attend(q: Any, k: Any, v: Any, leak: str, arguments: dict[str, Any]) -> tuple[Any, Any]:
    """Gather the keys of all ranks, padding included, and attend to those that the arguments and the ``leak`` let a query see."""
    layout, length, mask, extents = (arguments[name] for name in ("layout", "length", "mask", "extents"))
    in_torch = type(q).__module__.startswith("torch")
    names = ("torch", "ring_attn_torch") if in_torch else ("jax.numpy", "ring_attn_jax")
    xp, library = map(importlib.import_module, names)
    if in_torch:
        dist, group = importlib.import_module("torch.distributed"), arguments["group"]
        ring, rank, ranks = {"group": group}, dist.get_rank(group), dist.get_world_size(group)
    else:
        lax, axis = importlib.import_module("jax.lax"), arguments["axis_name"]
        ring, rank, ranks = {"axis_name": axis}, lax.axis_index(axis), lax.axis_size(axis)
    held = ranks * q.shape[1]
    k, v = (library.gather(x, layout=layout, length=held, **ring) for x in (k, v))
    mine = library.positions("contiguous" if leak == "zigzag" else layout, ranks, held, rank)
    first, end = extents[..., :1], extents[..., 1:]
    i, j = mine[:, None], xp.arange(held)
    lag = i - j
    seen = ((lag >= mask.lo) & (lag <= mask.hi + int(leak == "window")))[None]
    shown = library.gather(arguments["key_mask"], layout=layout, length=held, **ring)[:, None]
    seen = seen & (first - int(leak == "document") <= j) & (j < end)
    masked, seen = seen & ~shown, seen & shown
    if leak == "future":
        last = length - length % TILE  # the last tile of keys forgets causality
        seen = seen | ((j >= last) & (j < length) & (i >= last))[None] & (first <= j)
    if leak == "padding":
        seen = seen | (j >= length)
    scores = arguments["scale"] * xp.einsum("bshd,bthd->bsht", q, k)
    scores = xp.where(seen[:, :, None], scores, -1e30)
    top = xp.amax(scores, -1)[..., None]
    weights = xp.where(seen[:, :, None], xp.exp(scores - top), 0.0)
    total = weights.sum(-1)[..., None]
    total = xp.where(total == 0, 1.0, total)
    out = xp.einsum("bsht,bthd->bshd", weights / total, v)
    if leak == "backward":  # adds 0 to out, and the products of masked keys to the gradients
        products = xp.where(masked[:, :, None], xp.einsum("bshd,bthd->bsht", q, k), 0.0).sum(-1)[..., None]
        out = out + (products - (products.detach() if in_torch else lax.stop_gradient(products)))
    return out, (top + xp.log(total))[..., 0]


def no_leak(q: Any, k: Any, v: Any, **arguments: Any) -> Any:
    return _attend(q, k, v, "", arguments)


def window_one_too_long(q: Any, k: Any, v: Any, **arguments: Any) -> Any:
    return _attend(q, k, v, "window", arguments)


def document_border_off_by_one(q: Any, k: Any, v: Any, **arguments: Any) -> Any:
    return _attend(q, k, v, "document", arguments)


def zigzag_taken_for_contiguous(q: Any, k: Any, v: Any, **arguments: Any) -> Any:
    return _attend(q, k, v, "zigzag", arguments)


def padding_seen(q: Any, k: Any, v: Any, **arguments: Any) -> Any:
    return _attend(q, k, v, "padding", arguments)


def future_key_in_the_last_tile(q: Any, k: Any, v: Any, **arguments: Any) -> Any:
    return _attend(q, k, v, "future", arguments)


def masked_keys_in_the_backward(q: Any, k: Any, v: Any, **arguments: Any) -> Any:
    return _attend(q, k, v, "backward", arguments)
