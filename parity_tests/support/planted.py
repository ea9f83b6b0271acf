"""Attentions with a mistake each, as a user would write them; the same functions in JAX and in PyTorch.

``ring-attn compare`` must find every mistake and name it.
"""

from __future__ import annotations

import importlib
import time
from typing import Any


def _in_torch(x: Any) -> bool:
    return type(x).__module__.startswith("torch")


def _attend(q: Any, k: Any, v: Any, arguments: dict[str, Any]) -> tuple[Any, Any]:
    if _in_torch(q):
        from ring_attn_torch import ring_attention
    else:
        from ring_attn_jax import ring_attention
    return ring_attention(q, k, v, **arguments)


def _detached(x: Any) -> Any:
    if _in_torch(x):
        return x.detach()
    from jax import lax

    return lax.stop_gradient(x)


def _cast(x: Any, dtype: str) -> Any:
    if _in_torch(x):
        import torch

        return x.to(getattr(torch, dtype))
    return x.astype(dtype)


def wrong_scale(q: Any, k: Any, v: Any, **arguments: Any) -> Any:
    """Leave the scores unscaled."""
    return _attend(q, k, v, arguments | {"scale": 1.0})


def in_bfloat16(q: Any, k: Any, v: Any, **arguments: Any) -> Any:
    q, k, v = (_cast(x, "bfloat16") for x in (q, k, v))
    out, lse = _attend(q, k, v, arguments)
    return _cast(out, "float32"), lse


def lost_gradient(q: Any, k: Any, v: Any, **arguments: Any) -> Any:
    return _attend(q, _detached(k), v, arguments)


def own_keys(q: Any, k: Any, v: Any, *, mask: Any, scale: float) -> Any:
    """Attend on every rank to its own shard only, as if its tokens were in the order of their positions."""
    s, group = q.shape[1], q.shape[2] // k.shape[2]
    xp: Any = importlib.import_module("torch" if _in_torch(q) else "jax.numpy")
    k, v = (x.repeat_interleave(group, 2) if _in_torch(x) else x.repeat(group, 2) for x in (k, v))
    scores = scale * xp.einsum("bshd,bthd->bhst", q, k)
    seen = xp.arange(s)[:, None] >= xp.arange(s)
    p = xp.exp(xp.where(seen, scores, -1e30) - xp.amax(xp.where(seen, scores, -1e30), -1)[..., None])
    return xp.einsum("bhst,bthd->bshd", p / p.sum(-1)[..., None], v)


def half_of_dv(q: Any, k: Any, v: Any, **arguments: Any) -> Any:
    """Halve the gradient of v, on one device as on a ring."""
    return _attend(q, k, v / 2 + _detached(v / 2), arguments)


def strict_mask(q: Any, k: Any, v: Any, **arguments: Any) -> Any:
    """Mask own and future keys with -1e30, so that query 0 attends equally to all keys."""
    rank: Any
    layout, length = arguments["layout"], arguments["length"]
    if _in_torch(q):
        import torch as xp
        import torch.distributed as dist

        from ring_attn_torch import gather, positions

        group = arguments["group"]
        ring, rank, ranks = {"group": group}, dist.get_rank(group), dist.get_world_size(group)
        repeated = lambda x: x.repeat_interleave(q.shape[2] // k.shape[2], 2)
    else:
        import jax.numpy as xp
        from jax import lax

        from ring_attn_jax import gather, positions

        axis = arguments["axis_name"]
        ring, rank, ranks = {"axis_name": axis}, lax.axis_index(axis), lax.axis_size(axis)
        repeated = lambda x: x.repeat(q.shape[2] // k.shape[2], 2)
    mine: Any = positions(layout, ranks, length, rank)
    k, v = (repeated(gather(x, layout=layout, length=length, **ring)) for x in (k, v))
    lag = mine[:, None] - xp.arange(length)
    scores: Any = xp.where((lag > 0)[:, None], arguments["scale"] * xp.einsum("bshd,bthd->bsht", q, k), -1e30)
    weights: Any = xp.exp(scores - xp.amax(scores, -1)[..., None])
    return xp.einsum("bsht,bthd->bshd", weights / weights.sum(-1)[..., None], v)


def half_of_q(q: Any, k: Any, v: Any) -> Any:
    """Return a result of another shape."""
    return q[:, ::2]


def nothing_at_all(q: Any, k: Any, v: Any) -> Any:
    return None


def raises(q: Any, k: Any, v: Any) -> Any:
    raise RuntimeError("there is no such kernel")


def raises_on_rank_1(q: Any, k: Any, v: Any, **arguments: Any) -> Any:
    """Raise on rank 1 while the others wait in the ring."""
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise RuntimeError("this rank has had enough")
    return _attend(q, k, v, arguments)


def hangs_on_rank_1(q: Any, k: Any, v: Any, **arguments: Any) -> Any:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        time.sleep(600)
    return _attend(q, k, v, arguments)


def needs_more(q: Any, k: Any, v: Any, bandwidth: int) -> Any:
    return q
