"""The checks of a call's tensors, and its description as a Problem (plain data)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.autograd import forward_ad

from ring_attn_core.problem.checks import OptionalArray, check_v_dim
from ring_attn_core.problem.options import Options
from ring_attn_core.problem.problem import Problem
from ring_attn_core.records import MAX_KNOWN

from ..attend.launch import capability
from ..ring.groups import constant, group_of, is_dtensor


class Arrays(NamedTuple):
    """The optional arrays of a call, or their gradients, in the order in which ops take them: append a new array at the end.
    ``dropout_seed``: the dropout state, int64 [4]: the seed's two words, global indices of the first batch row and head."""

    extents: Tensor | None = None
    key_mask: Tensor | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    dropout_seed: Tensor | None = None
    key_extents: Tensor | None = None


NAMES = ("q", "k", "v", *Arrays._fields)
"""The names of a call's arrays, in the order of the ops' arguments."""


def problem_of(q: Tensor, k: Tensor, v: Tensor, arrays: Arrays, ranks: int, options: Options) -> Problem:
    """Describe the call as plain data, without array values. Equal calls get the same cached Problem."""
    kinds = tuple([None if x is None else (x.shape, x.dtype, x.device, x.layout) for x in (q, k, v, *arrays)])
    return _problem(kinds, ranks, options)


class Kind(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout


@lru_cache(maxsize=MAX_KNOWN)
def _problem(kinds: tuple[tuple[Any, ...] | None, ...], ranks: int, options: Options) -> Problem:
    """Build the problem. ``kinds``: the ``Kind`` of each array of ``NAMES``, or None if it was not passed."""
    passed = {name: Kind(*kind) for name, kind in zip(NAMES, kinds, strict=True) if kind is not None}
    check_places(passed)
    q, k, v, *arrays = (
        OptionalArray(name, () if name == "dropout_seed" else tuple(x.shape), dtype_name(x.dtype)) for name, x in passed.items()
    )
    dtypes, device = (q.dtype, k.dtype, v.dtype), passed["q"].device
    return Problem(q.shape, k.shape, v.shape, dtypes, device.type, ranks, options, tuple(arrays), capability(device), "torch")


def dtype_name(dtype: torch.dtype | str) -> str:
    """Return the name of a dtype as configs spell it, such as "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def values_of(k: Tensor, v: Tensor | None, v_dim: int | None) -> tuple[Tensor, int | None]:
    """Return (v, None), or (the first ``v_dim`` columns of k, ``v_dim``) if v is None."""
    v_dim = check_v_dim(v_dim, getattr(k, "shape", ()), None if v is None else getattr(v, "shape", ()))
    if v is None:
        v = k[..., :v_dim] if getattr(k, "shape", ()) else k
    return v, v_dim


def differentiates(tensors: Iterable[Any]) -> bool:
    """Return True if autograd records an operation on the tensors."""
    return torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tensors)


def refuse_transforms(tensors: Iterable[Any]) -> None:
    if torch.compiler.is_compiling():
        return
    if forward_ad._current_level >= 0 and any(
        isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors
    ):
        raise NotImplementedError("ring_attention has no forward-mode derivative: use backward or torch.autograd.grad")
    if any(transform.key() == TransformType.Grad for transform in get_interpreter_stack() or ()):
        raise NotImplementedError(
            "ring_attention has no derivative under torch.func.grad, vjp and the like: use backward or torch.autograd.grad"
        )


def check_tensors(q: Any, k: Any, v: Any, arrays: Arrays, group_name: str = "") -> None:
    passed = {"q": q, "k": k, "v": v} | {name: x for name, x in arrays._asdict().items() if x is not None}
    for label, x in passed.items():
        if is_dtensor(x):
            raise ValueError(f"{label} is a DTensor: pass this rank's shard, {label}.to_local(), in layout order (to_layout)")
        if not isinstance(x, Tensor):
            raise ValueError(f"{label} must be a torch.Tensor, got {type(x).__name__}")
    check_places(passed)
    if arrays.alibi_slopes is not None and arrays.alibi_slopes.requires_grad:
        raise ValueError("alibi_slopes are constants, and these require a gradient: pass alibi_slopes.detach()")
    check_served(q.device, group_name)


def check_places(arrays: Mapping[str, Any]) -> None:
    for label, x in arrays.items():
        if x.layout != torch.strided or getattr(x, "is_nested", False):
            raise ValueError(f"{label} is sparse or nested: pass a dense tensor; rows of unequal length are padded or packed")
        if x.device != arrays["q"].device:
            raise ValueError(f"{label} is on {x.device} and q on {arrays['q'].device}: move it")


def check_served(device: torch.device, group_name: str) -> None:
    """Raise ValueError if the group of ``group_name`` cannot send tensors on ``device``."""
    if group_name and device.type not in _devices(group_name):
        raise ValueError(
            f"q is on {device}, and this group's backend serves {', '.join(_devices(group_name))}: move the tensors, or "
            'make the group with a backend for that device, such as init_process_group("cpu:gloo,cuda:nccl")'
        )


@constant
def _devices(name: str) -> list[str]:
    config = dist.get_backend_config(group_of(name))
    return [pair.split(":")[0] for pair in config.split(",")]


def under_autocast(x: Tensor) -> Tensor:
    """Cast a tensor as autocast does: rotary embeddings would leave q and k in float32 beside a 16-bit v. float64 stays."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device))
