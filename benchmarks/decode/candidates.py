"""The candidates of benchmarks/decode: each returns a function without arguments that decodes one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ring_attn_torch import tree_attention_decode

Work = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """The shape of one step: sizes, slots of this rank's cache, and dtype. ``fp8``: the cache is float8."""

    batch: int = 1
    queries: int = 1
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    slots: int = 2**20
    dtype: str = "bfloat16"
    fp8: bool = False
    device: str = "cuda"

    @property
    def bytes(self) -> int:
        """Return the bytes that a step reads from the cache: keys, values and positions."""
        itemsize = 1 if self.fp8 else torch.empty(0, dtype=getattr(torch, self.dtype)).element_size()
        return self.batch * self.slots * (2 * self.kv_heads * self.dim * itemsize + 4)

    def __str__(self) -> str:
        sizes = f"{self.batch} x {self.queries} over {self.slots:,}, {self.heads}/{self.kv_heads} heads of {self.dim}"
        return f"{sizes}, {'fp8' if self.fp8 else self.dtype}"

    def tensors(self) -> dict[str, Tensor]:
        """Draw the arguments of ``tree_attention_decode``, random normal; the newest tokens are the queries."""
        generator = torch.Generator(self.device).manual_seed(0)
        dtype = getattr(torch, self.dtype)
        made = lambda *shape: torch.randn(*shape, device=self.device, generator=generator, dtype=dtype)
        in_cache = lambda x: x.to(torch.float8_e4m3fn) if self.fp8 else x
        b, n, t = self.batch, self.queries, self.slots
        positions = torch.arange(t, device=self.device, dtype=torch.int32).expand(b, t).contiguous()
        return {
            "q": made(b, n, self.heads, self.dim),
            "k": in_cache(made(b, t, self.kv_heads, self.dim)),
            "v": in_cache(made(b, t, self.kv_heads, self.dim)),
            "q_positions": positions[:, t - n :].clone(),  # a copy, aligned for DLPack
            "k_positions": positions,
        }


def ours(case: Case) -> Work:
    """Return our decoding, called from Python."""
    return partial(tree_attention_decode, **case.tensors())


def ours_in_a_graph(case: Case) -> Work:
    """Return our decoding, replayed as a CUDA graph."""
    work = ours(case)
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()

    def replay(work: Work = work) -> Tensor:  # keeps the arrays alive: a graph has only their addresses
        graph.replay()
        return out

    return replay


def ours_in_jax(case: Case) -> Work:
    """Return our decoding in JAX, jitted on a mesh of one device."""
    import jax

    import ring_attn_jax

    tensors = case.tensors()
    numbers = {name: x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x for name, x in tensors.items()}
    arrays = {name: jax.dlpack.from_dlpack(x) for name, x in numbers.items()}
    if case.fp8:
        arrays |= {name: jax.lax.bitcast_convert_type(arrays[name], jax.numpy.float8_e4m3fn) for name in ("k", "v")}
    mesh = jax.make_mesh((1,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    whole = jax.sharding.PartitionSpec()
    specs = (dict.fromkeys(arrays, whole),)
    decode = lambda given: ring_attn_jax.tree_attention_decode(**given)
    step = jax.jit(jax.shard_map(decode, mesh=mesh, in_specs=specs, out_specs=whole))
    return lambda: step(arrays)


def tree_attn_decode_formula(case: Case) -> Work:
    """Return the formula of ring-attention-pytorch 0.5.21's tree_attn_decode on one rank, written from its description.

    Products over all heads, with k and v repeated for the query heads of a group, and a softmax by maximum and sum.
    """
    given = case.tensors()
    q, k, v = (given[name].to(getattr(torch, case.dtype)) for name in "qkv")

    def step() -> Tensor:
        q_, k_, v_ = (x.transpose(1, 2) for x in (q, k, v))
        k_, v_ = (x.repeat_interleave(case.heads // case.kv_heads, 1) for x in (k_, v_))
        s = (q_ * case.dim**-0.5) @ k_.mT
        top = s.amax(-1, keepdim=True)
        p = (s - top).exp()
        total = p.sum(-1, keepdim=True)
        return (p @ v_ / total).transpose(1, 2)

    return step


def sdpa(case: Case) -> Work:
    """Return PyTorch's own attention, with heads first in memory, its fastest order."""
    given = case.tensors()
    q, k, v = (given[name].to(getattr(torch, case.dtype)).transpose(1, 2).contiguous() for name in "qkv")
    return lambda: scaled_dot_product_attention(q, k, v, enable_gqa=case.heads != case.kv_heads)


def sdpa_slots_first(case: Case) -> Work:
    """Return PyTorch's own attention in our memory order, with the heads of a slot side by side."""
    given = case.tensors()
    q, k, v = (given[name].to(getattr(torch, case.dtype)).transpose(1, 2) for name in "qkv")
    return lambda: scaled_dot_product_attention(q, k, v, enable_gqa=case.heads != case.kv_heads)


def flash_decoding(case: Case) -> Work:
    """Return FlashAttention-2's split-k decoding; needs flash-attn."""
    from flash_attn import flash_attn_with_kvcache  # pyright: ignore[reportMissingImports]

    given = case.tensors()
    return lambda: flash_attn_with_kvcache(given["q"], given["k"], given["v"], causal=True)


def flash_attention_4(case: Case) -> Work:
    """Return FlashAttention-4; needs flash-attn-4."""
    from flash_attn.cute import flash_attn_func  # pyright: ignore[reportMissingImports]

    given = case.tensors()
    return lambda: flash_attn_func(given["q"], given["k"], given["v"], causal=True)


def flashinfer_decode(case: Case) -> Work:
    """Return FlashInfer's decoding of one request; needs flashinfer."""
    import flashinfer  # pyright: ignore[reportMissingImports]

    given = case.tensors()
    q, k, v = (given[name] for name in "qkv")
    if case.batch == 1 and case.queries == 1 and case.dim == 128 and not case.fp8:  # each kind compiles for a minute
        return lambda: flashinfer.single_decode_with_kv_cache(q[0, 0], k[0], v[0], kv_layout="NHD", use_tensor_cores=True)
    raise RuntimeError("only one query of one request is measured, of heads of 128 in bfloat16")


ON_GPU: dict[str, Callable[[Case], Work]] = {
    "ring_attn_torch": ours,
    "ring_attn_torch, CUDA graph": ours_in_a_graph,
    "ring_attn_jax": ours_in_jax,
    "ring-attention-pytorch's formula": tree_attn_decode_formula,
    "SDPA": sdpa,
    "FlashAttention-2": flash_decoding,
    "FlashAttention-4": flash_attention_4,
    "FlashInfer": flashinfer_decode,
}

ON_CPU: dict[str, Callable[[Case], Work]] = {
    "ring_attn_torch": ours,
    "ring_attn_jax": ours_in_jax,
    "ring-attention-pytorch's formula": tree_attn_decode_formula,
    "SDPA": sdpa,
    "SDPA, slots first": sdpa_slots_first,
}
