"""The candidates of benchmarks/kernel: each returns a forward and a backward on one GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh, PartitionSpec
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import ring_attn_jax
import ring_attn_torch
from ring_attn_core import Band, causal

from ..support.turns import Work

CAUSAL = causal()


@dataclass(frozen=True)
class Case:
    """The shape of a problem, its mask, and its features as (name, value) pairs (``arguments``). ``v_dim``: ``dim`` if None.

    ``values_in_keys``: the values are the first ``v_dim`` columns of k, as in latent attention.
    """

    batch: int = 1
    heads: int = 16
    kv_heads: int = 16
    tokens: int = 16384
    dim: int = 128
    mask: Band = CAUSAL
    features: tuple[tuple[str, Any], ...] = ()
    v_dim: int | None = None
    values_in_keys: bool = False

    @property
    def widths(self) -> tuple[int, int]:
        """Return the head dimensions of q and k, and of v."""
        return self.dim, self.dim if self.v_dim is None else self.v_dim

    @property
    def flops(self) -> tuple[float, float]:
        """Return the FLOPs of a forward (two matrix products) and a backward (five) over the visible pairs of all heads."""
        d, e = self.widths
        length = dict(self.features).get("documents", self.tokens)
        pairs = self.batch * self.heads * self.mask.area(length, length) * self.tokens / length
        return 2.0 * pairs * (d + e), 2.0 * pairs * (3 * d + 2 * e)

    def __str__(self) -> str:
        mask = "causal" if self.mask == causal() else "full" if self.mask == Band() else str(self.mask)
        of_v = "" if self.v_dim is None else f" and values of {self.v_dim}" + " in keys" * self.values_in_keys
        text = f"{self.batch} x {self.tokens:,}, {self.heads}/{self.kv_heads} heads of {self.dim}{of_v}, {mask}"
        return text + "".join(f", {name}" + f" of {value:,}" * (name == "documents") for name, value in self.features)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Draw q, k, v and the cotangent of out, [b s h d] in bfloat16, random normal."""
        generator = torch.Generator("cuda").manual_seed(0)
        d, e = self.widths
        shape = lambda heads, width: (self.batch, self.tokens, heads, width)
        make = lambda *of: torch.randn(shape(*of), device="cuda", generator=generator).bfloat16()
        q, k, v, dout = make(self.heads, d), make(self.kv_heads, d), make(self.kv_heads, e), make(self.heads, e)
        return q, k, k[..., :e] if self.values_in_keys else v, dout

    def arguments(self) -> dict[str, Any]:
        """Return the features as arguments of ring_attention."""
        b, s, h = self.batch, self.tokens, self.heads
        generator = torch.Generator("cuda").manual_seed(1)
        made = {
            "softcap": lambda x: {"softcap": x},
            "sinks": lambda _: {"sinks": torch.randn(h, device="cuda", generator=generator)},
            "alibi": lambda _: {"alibi_slopes": torch.tensor([2.0 ** -(i + 1) for i in range(h)], device="cuda")},
            "key_mask": lambda share: {"key_mask": torch.rand(b, s, device="cuda", generator=generator) < share},
            "padding": lambda share: {"key_mask": (torch.arange(s, device="cuda") < share * s).expand(b, s)},
            "extents": lambda _: {"extents": torch.tensor([0, s], device="cuda", dtype=torch.int32).expand(b, s, 2).contiguous()},
            "documents": lambda length: {"extents": _documents(b, s, length)},
            "dropout": lambda rate: {"dropout_rate": rate, "dropout_seed": 7},
        }
        return {name: x for feature, value in self.features for name, x in made[feature](value).items()}


def _documents(batch: int, tokens: int, length: int) -> torch.Tensor:
    first = torch.arange(tokens, device="cuda", dtype=torch.int32) // length * length
    return torch.stack([first, (first + length).clamp(max=tokens)], -1).expand(batch, tokens, 2).contiguous()


def of_torch(attend: Callable[..., torch.Tensor], case: Case, heads_first: bool = False) -> tuple[Work, Work, Work]:
    """Return functions (results, forward, backward) of an attention in PyTorch. ``heads_first``: it takes [b h s d]."""
    order = (lambda x: x.transpose(1, 2).contiguous()) if heads_first else (lambda x: x)
    *leaves, dout = (order(x) for x in case.tensors())
    leaves = [x.requires_grad_() for x in leaves]
    out = attend(*leaves)
    grads = lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)
    back = (lambda x: x.transpose(1, 2)) if heads_first else (lambda x: x)
    detached = [x.detach() for x in leaves]
    return lambda: [back(x.detach()) for x in (out, *grads())], lambda: attend(*detached), grads


def of_jax(attend: Callable[..., jax.Array], case: Case) -> tuple[Work, Work, Work]:
    """Return functions (results, forward, backward) of an attention in JAX, each pass one jitted program."""
    q, k, v, dout = (jax.dlpack.from_dlpack(x) for x in case.tensors())
    forward = jax.jit(attend)
    out, vjp = jax.vjp(forward, q, k, v)
    backward = jax.jit(lambda vjp, dout: vjp(dout))
    as_torch = lambda: [torch.from_dlpack(x) for x in (out, *backward(vjp, dout))]
    return as_torch, lambda: forward(q, k, v), lambda: backward(vjp, dout)


def ours_in_torch(case: Case, backend: str = "auto") -> tuple[Work, Work, Work]:
    return of_torch(partial(ring_attn_torch.ring_attention, mask=case.mask, backend=backend, **case.arguments()), case)


def ours_in_jax(case: Case, backend: str = "auto") -> tuple[Work, Work, Work]:
    given = case.arguments()
    arrays = {name: jax.dlpack.from_dlpack(x.byte() if x.dtype == torch.bool else x) for name, x in given.items() if _is_array(x)}
    arrays = {name: x.astype(bool) if name == "key_mask" else x for name, x in arrays.items()}
    numbers = {name: x for name, x in given.items() if not _is_array(x)}
    mesh = Mesh(np.array(jax.devices()[:1]), ("seq",))
    attend = partial(ring_attn_jax.ring_attention, mask=case.mask, backend=backend, **numbers)
    inside = lambda q, k, v, arrays: attend(q, k, v, **arrays)
    ring = jax.shard_map(inside, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    return of_jax(lambda q, k, v: ring(q, k, v, arrays), case)


def _is_array(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def forward_in_torch(case: Case, backend: str = "auto") -> Work:
    """Return the forward alone, which reads the values in the keys if the case says so."""
    q, k, v, _ = case.tensors()
    keys = {"k": k, "v_dim": case.v_dim} if case.values_in_keys else {"k": k, "v": v}
    return lambda: ring_attn_torch.ring_attention(q, **keys, mask=case.mask, backend=backend, **case.arguments())


def forward_in_jax(case: Case, backend: str = "auto") -> Work:
    """Return the same in JAX, as one jitted program."""
    q, k, v, _ = (jax.dlpack.from_dlpack(x.contiguous()) for x in case.tensors())
    mesh, keys = Mesh(np.array(jax.devices()[:1]), ("seq",)), (k,) if case.values_in_keys else (k, v)
    numbers = {"v_dim": case.v_dim} if case.values_in_keys else {}
    attend = partial(ring_attn_jax.ring_attention, mask=case.mask, backend=backend, **numbers)
    ring = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False))
    return lambda: ring(q, *keys)


def sdpa(which: SDPBackend, case: Case) -> tuple[Work, Work, Work]:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(which):
            is_causal, grouped = case.mask == causal(), case.heads != case.kv_heads
            return scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=grouped)

    return of_torch(attend, case, heads_first=True)


def flash_attention_4(case: Case) -> tuple[Work, Work, Work]:
    """Return the functions of FlashAttention-4. Raise RuntimeError if flash-attn-4 is not installed."""
    try:
        from flash_attn.cute import flash_attn_func  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise RuntimeError(f"not installed (pip install flash-attn-4): {error}") from error

    return of_torch(lambda q, k, v: flash_attn_func(q, k, v, causal=case.mask == causal())[0], case)


def cudnn_in_jax(case: Case) -> tuple[Work, Work, Work]:
    is_causal = case.mask == causal()
    return of_jax(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=is_causal, implementation="cudnn"), case)


CANDIDATES: dict[str, Callable[[Case], tuple[Work, Work, Work]]] = {
    "ring_attn_torch": ours_in_torch,
    "ring_attn_jax": ours_in_jax,
    "ring_attn_torch, triton": partial(ours_in_torch, backend="triton"),
    "FlashAttention-2": partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "FlashAttention-4": flash_attention_4,
    "cuDNN": partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "cuDNN in JAX": cudnn_in_jax,
}


def truth(case: Case) -> list[torch.Tensor]:
    """Return out, dq, dk, dv in float64, computed one head at a time."""
    q, k, v, dout = (x.double() for x in case.tensors())
    group = case.heads // case.kv_heads
    i, j = (torch.arange(case.tokens, device="cuda") for _ in range(2))
    lag = i[:, None] - j
    hidden = torch.zeros_like(lag, dtype=torch.bool)
    for bound, beyond in ((case.mask.lo, torch.lt), (case.mask.hi, torch.gt)):
        hidden |= beyond(lag, bound) if bound is not None else False
    out, dq, dk, dv = torch.zeros_like(dout), torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for head in range(case.heads):
        of_kv = head // group
        leaves = [x.clone().requires_grad_() for x in (q[:, :, head], k[:, :, of_kv], v[:, :, of_kv])]
        scores = (leaves[0] @ leaves[1].mT / math.sqrt(case.dim)).masked_fill(hidden, -math.inf)
        mine = scores.softmax(-1) @ leaves[2]
        gradients = torch.autograd.grad(mine, leaves, dout[:, :, head])
        out[:, :, head], dq[:, :, head] = mine.detach(), gradients[0]
        dk[:, :, of_kv] += gradients[1]
        dv[:, :, of_kv] += gradients[2]
    return [out, dq, dk, dv]
