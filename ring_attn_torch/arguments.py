"""From what a user passes to a Problem, or a clear error."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._functorch.pyfunctorch import GradInterpreter, retrieve_all_functorch_interpreters
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor

from ring_attn_core.kernels.backends import VENDORS, runnable
from ring_attn_core.masks import check_mask
from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.problem.checks import Given
from ring_attn_core.problem.problem import Problem
from ring_attn_core.runs import Band

from .attend.backend import Backend
from .attend.blockwise import Blockwise
from .attend.kernels import Kernels
from .attend.launch import capability
from .attend.score import Score
from .attend.vendor import Vendor
from .ring.groups import Group, group_of, ranks_of

ARRAYS = "extents", "key_mask", "sinks", "alibi_slopes", "draw"
"""The optional arrays of the ops, in their order."""


def problem_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arrays: tuple[Tensor | None, ...],
    group: Group,
    layout: str,
    lo: int | None,
    hi: int | None,
    length: int | None,
    kv_length: int | None,
    scale: float | None,
    softcap: float | None,
    dropout_rate: float,
    backend: str,
    dropout_offset: Sequence[int] | None = None,
) -> Problem:
    name = lambda x: str(x.dtype).removeprefix("torch.")
    *optional, draw = arrays
    given = [Given(label, tuple(x.shape), name(x)) for label, x in zip(ARRAYS, optional, strict=False) if x is not None]
    given += [] if draw is None else [Given("dropout_seed", (), "int64")]
    return Problem(
        tuple(q.shape),
        tuple(k.shape),
        tuple(v.shape),
        (name(q), name(k), name(v)),
        q.device.type,
        ranks_of(group),
        layout,
        Band(lo, hi),
        length,
        kv_length,
        scale,
        softcap,
        dropout_rate,
        tuple(given),
        backend,
        capability(q.device),
        "torch",
        dropout_offset=None if dropout_offset is None else tuple(dropout_offset),
    )


class Prepared(NamedTuple):
    """A problem that passed every check: its plan, its score without the arrays, and who computes it."""

    plan: RingPlan
    score: Score
    backend: Backend


@lru_cache(maxsize=1024)
def checked(problem: Problem, anywhere: bool = False) -> Prepared:
    """What a problem needs to run, checked, and its kernels compiled, once for every problem that this process meets.

    ``anywhere``: it is a block that may stand wherever it is told to, not where the plan has it.
    """
    plan = problem.check()
    scale = problem.q_shape[-1] ** -0.5 if problem.scale is None else problem.scale
    return Prepared(plan, Score(scale, problem.softcap, problem.dropout_rate), _backend_of(problem, anywhere))


def _backend_of(problem: Problem, anywhere: bool) -> Backend:
    call = runnable(problem, anywhere)
    if call is not None:
        return Kernels(call, problem.blanks or anywhere)
    return Vendor(problem.backend) if problem.backend in VENDORS else Blockwise()


def refuse_transforms(*tensors: Any) -> None:
    """NotImplementedError for dual numbers, whose tangents a custom op would drop without a word, and under torch.func.grad."""
    if torch.compiler.is_compiling():
        return
    if forward_ad._current_level >= 0 and any(
        isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors
    ):
        raise NotImplementedError("ring_attention has no forward-mode derivative: use backward or torch.autograd.grad")
    if any(isinstance(transform, GradInterpreter) for transform in retrieve_all_functorch_interpreters()):
        raise NotImplementedError(
            "ring_attention has no derivative under torch.func.grad, vjp and the like: use backward or torch.autograd.grad"
        )


def check_inputs(q: Any, k: Any, v: Any, name: str, mask: Any, arrays: dict[str, Any], **arguments: Any) -> None:
    """ValueError for what the op's schema could not take or the group could not send.

    No tensors, DTensors, sparse or nested ones, several devices, a device that the group's backend does not serve, a mask or
    number of another type, slopes that want a gradient. ``arrays`` are the optional ones, None where not given.
    """
    given = {label: x for label, x in arrays.items() if x is not None}
    for label, x in {"q": q, "k": k, "v": v, **given}.items():
        if isinstance(x, DTensor):
            raise ValueError(f"{label} is a DTensor: pass this rank's shard, {label}.to_local(), in layout order (to_layout)")
        if not isinstance(x, Tensor):
            raise ValueError(f"{label} must be a torch.Tensor, got {type(x).__name__}")
        if x.layout != torch.strided or x.is_nested:
            raise ValueError(f"{label} is sparse or nested: pass a dense tensor; rows of unequal length are padded or packed")
        if x.device != q.device:
            raise ValueError(f"{label} is on {x.device} and q on {q.device}: move it")
    if "alibi_slopes" in given and given["alibi_slopes"].requires_grad:
        raise ValueError("alibi_slopes are constants, and these require a gradient: pass alibi_slopes.detach()")
    if name and q.device.type not in _devices(name):
        raise ValueError(
            f"q is on {q.device}, and this group's backend serves {', '.join(_devices(name))}: move the tensors, or "
            'make the group with a backend for that device, such as init_process_group("cpu:gloo,cuda:nccl")'
        )
    check_mask(mask)
    for label, value in (("mask.lo", mask.lo), ("mask.hi", mask.hi), *arguments.items()):
        expected = _TYPES[label]
        if not isinstance(value, expected) or isinstance(value, bool):
            kinds = " or ".join("None" if kind is type(None) else kind.__name__ for kind in expected)
            raise ValueError(f"{label} must be {kinds}, got {value!r}")
        if int in expected and float not in expected and isinstance(value, int) and abs(value) >= 2**62:
            raise ValueError(f"{label} counts tokens, got {value}: to see everything on a side, leave it open as causal() does")


_TYPES: dict[str, tuple[type, ...]] = {
    "layout": (str,),
    "backend": (str,),
    "mask.lo": (int, type(None)),
    "mask.hi": (int, type(None)),
    "length": (int, type(None)),
    "kv_length": (int, type(None)),
    "scale": (float, int, type(None)),
    "softcap": (float, int, type(None)),
    "dropout_rate": (float, int),
}


@torch.compiler.assume_constant_result
def _devices(name: str) -> list[str]:
    """The kinds of device that the group has a backend for."""
    config = dist.get_backend_config(group_of(name))
    return [pair.split(":")[0] for pair in config.split(",")]
