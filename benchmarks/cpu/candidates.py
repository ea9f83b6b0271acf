"""The attention candidates on a CPU, each prepared for one rank of one case in a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from ring_attn_core.layouts import padded_local
from ring_attn_core.masks import MASKS, full
from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.runs import Band

from ..support.process import available
from ..support.report import cores

HEADS, DIM = 8, 64


class Case(NamedTuple):
    """A problem of batch 1, HEADS heads of DIM, float32, random normal. ``mask``: "causal" or "full"."""

    tokens: int
    mask: str

    @property
    def band(self) -> Band:
        return MASKS[self.mask]()

    def inputs(self) -> list[np.ndarray]:
        """Return q, k, v and the cotangent of out, as global arrays."""
        random = np.random.default_rng(0)
        return [random.standard_normal((1, self.tokens, HEADS, DIM), np.float32) for _ in range(4)]

    def flops(self, passes: str) -> float:
        """Return the FLOPs of 2 matrix products forward and 5 backward, half as many under a causal mask."""
        forward = 4 * self.tokens**2 * DIM * HEADS / (2 if self.mask == "causal" else 1)
        return forward if passes == "forward" else 3.5 * forward


class Prepared(NamedTuple):
    """One rank's share of a case. ``positions``: the position of each token of its arrays; those past the end are padding."""

    positions: list[int]
    forward: Callable[[], Any]
    both: Callable[[], tuple[Any, ...]]
    """A function that returns out, dq, dk, dv."""
    meet: Callable[[], Any] = lambda: None
    """A barrier over all ranks."""


@dataclass(frozen=True)
class Candidate:
    """One candidate. ``prepare(case, rank, store)`` runs in the measuring process, or in each of ``processes`` of a ring.

    ``pads``: True if it takes any number of tokens, not only multiples of its processes. ``needs``: a module besides the
    framework.
    """

    prepare: Callable[[Case, int, str], Prepared]
    framework: str
    processes: int = 1
    devices: int = 1
    needs: str | None = None
    pads: bool = True

    @property
    def installed(self) -> bool:
        return all(find_spec(name) for name in (self.framework, self.needs) if name)

    @property
    def environment(self) -> dict[str, str]:
        return {"XLA_FLAGS": f"--xla_force_host_platform_device_count={self.devices}"} if self.framework == "jax" else {}


def shards(case: Case, layout: str, ranks: int, rank: int | None) -> tuple[list[int], list[np.ndarray]]:
    """Return positions and inputs of one rank, or of all ranks in layout order if ``rank`` is None; padding is 0."""
    plan = RingPlan(layout, full(), ranks, padded_local(layout, ranks, case.tokens), length=case.tokens)
    positions = [p for r in (range(ranks) if rank is None else (rank,)) for p in plan.positions(r)]
    padding = ((0, 0), (0, plan.seq_local * ranks - case.tokens), (0, 0), (0, 0))
    return positions, [np.pad(x, padding)[:, positions] for x in case.inputs()]


def torch_rank(attention: Callable[..., Any], ranks: int, layout: str, case: Case, rank: int, store: str) -> Prepared:
    """Prepare ``attention(q, k, v, case)`` on tensors [1, tokens, heads, dim], with the cores shared among the ranks."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(max(cores() // ranks, 1))
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    positions, arrays = shards(case, layout, ranks, rank)
    *leaves, dout = map(torch.from_numpy, arrays)

    def forward() -> Any:
        with torch.no_grad():
            return attention(*leaves, case)

    def both() -> tuple[Any, ...]:
        for x in leaves:
            x.grad = None
            x.requires_grad_()
        out = attention(*leaves, case)
        out.backward(dout)
        return out.detach(), *(x.grad for x in leaves)

    return Prepared(positions, forward, both, dist.barrier if ranks > 1 else lambda: None)


def ring_attn_torch(q: Any, k: Any, v: Any, case: Case) -> Any:
    import ring_attn_torch

    return ring_attn_torch.ring_attention(q, k, v, mask=case.band, length=case.tokens)


def torch_sdpa(q: Any, k: Any, v: Any, case: Case) -> Any:
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=case.mask == "causal").transpose(1, 2)


def ring_attention_pytorch(q: Any, k: Any, v: Any, case: Case, ring: bool) -> Any:
    """Call the package ring-attention-pytorch: alone with its default bucket of 1,024 keys, or in a ring striped by token."""
    from ring_attention_pytorch import ring_flash_attn  # pyright: ignore[reportMissingImports]

    causal = case.mask == "causal"
    if not ring:
        return ring_flash_attn(q, k, v, causal=causal)
    return ring_flash_attn(q, k, v, causal=causal, bucket_size=q.shape[1], ring_reduce_col=True, striped_ring_attn=causal)


def jax_devices(attention: Callable[..., Any], ranks: int, layout: str, case: Case, rank: int, store: str) -> Prepared:
    """Prepare ``attention(q, k, v, case, mesh)``, compiled, on arrays sharded over ``ranks`` devices of this process."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((ranks,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    positions, arrays = shards(case, layout, ranks, None)
    inputs = [jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "seq"))) for x in arrays]

    def both(q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, ...]:
        out, vjp = jax.vjp(lambda *qkv: attention(*qkv, case, mesh), q, k, v)
        return out, *vjp(dout)

    run_forward = _compiled(lambda q, k, v: attention(q, k, v, case, mesh), inputs[:3], ranks)
    run_both = _compiled(both, inputs, ranks)
    return Prepared(positions, run_forward, run_both)


def _compiled(function: Callable[..., Any], inputs: list[Any], ranks: int) -> Callable[[], Any]:
    """Compile ``function`` for these inputs; the call raises MemoryError if XLA's estimate exceeds 90 % of the free memory."""
    import jax

    compiled = jax.jit(function).lower(*inputs).compile()
    needed = ranks * (compiled.memory_analysis().temp_size_in_bytes + compiled.memory_analysis().output_size_in_bytes)  # pyright: ignore[reportOptionalMemberAccess]

    def call() -> Any:
        if needed > 0.9 * available():
            raise MemoryError(f"needs {needed / 2**30:.1f} GiB beside its inputs")
        return jax.block_until_ready(compiled(*inputs))

    return call


def ring_attn_jax(q: Any, k: Any, v: Any, case: Case, mesh: Any) -> Any:
    import ring_attn_jax

    return ring_attn_jax.sharded_ring_attention(q, k, v, mesh=mesh, mask=case.band, length=case.tokens)


def jax_attention(q: Any, k: Any, v: Any, case: Case, mesh: Any) -> Any:
    import jax

    return jax.nn.dot_product_attention(q, k, v, is_causal=case.mask == "causal")


BASE = "torch sdpa"
CANDIDATES: dict[str, Candidate] = {
    BASE: Candidate(partial(torch_rank, torch_sdpa, 1, "contiguous"), "torch"),
    "ring_attn_torch": Candidate(partial(torch_rank, ring_attn_torch, 1, "zigzag"), "torch"),
    "ring_attn_torch, 4 ranks": Candidate(partial(torch_rank, ring_attn_torch, 4, "zigzag"), "torch", processes=4),
    "ring_attn_jax": Candidate(partial(jax_devices, ring_attn_jax, 1, "zigzag"), "jax"),
    "ring_attn_jax, 4 ranks": Candidate(partial(jax_devices, ring_attn_jax, 4, "zigzag"), "jax", devices=4),
    "jax.nn.dot_product_attention": Candidate(partial(jax_devices, jax_attention, 1, "contiguous"), "jax"),
    "ring-attention-pytorch": Candidate(
        partial(torch_rank, partial(ring_attention_pytorch, ring=False), 1, "contiguous"), "torch", needs="ring_attention_pytorch"
    ),
    "ring-attention-pytorch, 4 ranks": Candidate(
        partial(torch_rank, partial(ring_attention_pytorch, ring=True), 4, "striped"),
        "torch",
        processes=4,
        needs="ring_attention_pytorch",
        pads=False,
    ),
}
