"""Runs the calls of functional_calls.py on the ranks of a ring, and by torch's own functions."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from ring_attn_torch import functional, to_layout

from ..support.functional import Call
from .functional_calls import draw

Group = dist.ProcessGroup | None


def over_a_ring(group: Group, name: str, seeds: list[int]) -> list[dict[str, np.ndarray] | str]:
    """Return for each draw this rank's shards of out, its gradients and the lse it returns, or the words of its refusal."""
    return [on_rank(group, draw(name, seed)) for seed in seeds]


def on_rank(group: Group, call: Call) -> dict[str, np.ndarray] | str:
    """One rank's results. Padding is NaN."""
    ranks, rank = (1, 0) if group is None else (group.size(), group.rank())
    dtype, (queries, keys) = getattr(torch, call.dtype), call.lengths
    alone = group is None  # as a user of one device: arrays as they are, no lengths
    own = lambda x: (
        torch.from_numpy(x)
        if alone
        else to_layout(torch.from_numpy(x), call.layout, ranks, pad_value=torch.nan).chunk(ranks, 1)[rank]
    )
    shards = {
        name: own(x).to(dtype if name != "dlse" else torch.promote_types(dtype, torch.float32)) for name, x in call.arrays.items()
    }
    leaves = [shards[name].contiguous().requires_grad_() for name in "qkv"]
    ring = {} if alone else {"group": group, "layout": call.layout, "length": queries, "kv_length": keys}
    order = INTO[call.name]
    try:
        got = getattr(functional, call.name)(*map(order, leaves), **call.arguments, **ring)
    except ValueError as error:
        return str(error)
    out, *lse = got if isinstance(got, tuple) else (got,)
    results = {"out": order(out, back=True)}
    if lse:
        results["lse"] = (lse[0] if lse[0].ndim == 3 else lse[0][None]).transpose(1, 2)
    gradients = torch.autograd.grad(list(results.values()), leaves, [shards["d" + name] for name in results])
    results |= dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    if out.dtype != dtype or order(leaves[0]).shape[:-1] != out.shape[:-1]:
        return f"out is {out.dtype} {list(out.shape)}"
    return {name: x.detach().to(torch.promote_types(x.dtype, torch.float32)).numpy() for name, x in results.items()}


def _heads_first(x: Tensor, back: bool = False) -> Tensor:
    return x.transpose(1, 2)


INTO: dict[str, Callable[..., Tensor]] = {
    "flash_attn_func": lambda x, back=False: x,
    "flash_attn_varlen_func": lambda x, back=False: x[None] if back else x[0],
    "scaled_dot_product_attention": _heads_first,
    "flex_attention": _heads_first,
}
"""From [batch, tokens, heads, dim] into the layout of each function, and back."""


def originals(call: Call) -> dict[str, np.ndarray]:
    """Return what torch's own function returns in float64, and its gradients; flex_attention has none on a CPU."""
    differentiable = call.name != "flex_attention"
    leaves = [torch.from_numpy(call.arrays[name]).double().transpose(1, 2).requires_grad_(differentiable) for name in "qkv"]
    arguments = dict(call.arguments)
    original = getattr(F if call.name == "scaled_dot_product_attention" else flex, call.name)
    if isinstance(mask := arguments.get("attn_mask"), Tensor) and mask.is_floating_point() and type(mask) is Tensor:
        arguments["attn_mask"] = mask.double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = original(*leaves, **arguments)
    out, *lse = got if isinstance(got, tuple) else (got,)
    results = dict(zip(("out", "lse"), (out, *lse), strict=False))
    cotangents = [torch.from_numpy(call.arrays["d" + name]).double().transpose(1, 2) for name in results]
    if differentiable:
        results |= dict(zip(("dq", "dk", "dv"), torch.autograd.grad(list(results.values()), leaves, cotangents), strict=True))
    return {name: x.detach().transpose(1, 2).numpy() for name, x in results.items()}
