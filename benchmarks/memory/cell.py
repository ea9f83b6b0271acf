"""The measurements of benchmarks/memory in a fresh process: the peak of one framework, or XLA's temporary memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ring_attn_core import masks

from ..support.process import Memory, answer, argument, run_fresh

HEADS, DIM = 2, 64
FRAMEWORKS = ("torch", "jax")
MOST = 1.75
"""Largest allowed peak, as a multiple of the bytes of the eight arrays q, k, v, out and their gradients."""
RANKS = (2, 4, 8)


def peak_ratio(framework: str, tokens: int, mask: str = "causal") -> float:
    """Return the peak resident memory of forward and backward above imports, over the bytes of the eight arrays.

    ``mask``: as ``masks.parse`` reads it.
    """
    peak = run_fresh(__name__, {"what": framework, "tokens": tokens, "mask": mask})[0]
    return peak / (8 * tokens * HEADS * DIM * 4)


def temp_bytes(
    ranks: Sequence[int], seq_local: int, mask: str = "causal", in_order: bool = False, strategy: str = "auto"
) -> list[dict[str, int]]:
    """Return XLA's temporary memory per rank of the JAX ring, {"forward": bytes, "both": bytes} for each number of ranks.

    ``seq_local``: tokens per rank. ``in_order``: let XLA schedule for little memory instead of for concurrency, its default on
    CPUs.
    """
    flags = f"--xla_force_host_platform_device_count={max(ranks)}"
    if in_order:
        flags += " --xla_cpu_enable_concurrency_optimized_scheduler=false"
    task = {"what": "compiled", "ranks": ranks, "seq_local": seq_local, "mask": mask, "strategy": strategy}
    return run_fresh(__name__, task, environment={"XLA_FLAGS": flags})[0]


def shard_bytes(seq_local: int) -> int:
    """Return the bytes of one rank's packed k/v."""
    return seq_local * HEADS * 2 * DIM * 4


def torch_peak(tokens: int, mask: str) -> int:
    import torch

    import ring_attn_torch

    def step(tokens: int) -> None:
        q, k, v = (torch.randn(1, tokens, HEADS, DIM).requires_grad_() for _ in range(3))
        dout = torch.randn(1, tokens, HEADS, DIM)
        out = ring_attn_torch.ring_attention(q, k, v, mask=masks.parse(mask))
        out.backward(dout)

    step(1024)  # warm up threads and libraries, whose memory does not grow with the tokens
    memory = Memory()
    step(tokens)
    return memory.peak()


def jax_peak(tokens: int, mask: str) -> int:
    import jax

    def step(tokens: int) -> Callable[[], Any]:
        keys = jax.random.split(jax.random.key(0), 4)
        make = jax.jit(lambda key: jax.random.normal(key, (1, tokens, HEADS, DIM))).lower(keys[0]).compile()
        compiled = _ring(1, tokens, mask)[1]
        return lambda: jax.block_until_ready(compiled(*map(make, keys)))

    step(1024)()
    real = step(tokens)  # compile before measuring: the compiler's memory does not grow with the tokens
    memory = Memory()
    real()
    return memory.peak()


def compiled_bytes(ranks: int, seq_local: int, mask: str, strategy: str) -> dict[str, int]:
    forward, both = (each.memory_analysis().temp_size_in_bytes for each in _ring(ranks, seq_local * ranks, mask, strategy))
    return {"forward": forward, "both": both}


def _ring(ranks: int, tokens: int, mask: str, strategy: str = "auto") -> tuple[Any, Any]:
    """Compile the JAX ring over ``ranks`` devices: the forward, and forward with backward for a given cotangent."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    import ring_attn_jax

    mesh = jax.make_mesh((ranks,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec(None, "seq"))
    shape = jax.ShapeDtypeStruct((1, tokens, HEADS, DIM), "float32", sharding=sharding)

    def forward(q: Any, k: Any, v: Any) -> Any:
        return ring_attn_jax.sharded_ring_attention(q, k, v, mesh=mesh, mask=masks.parse(mask), strategy=strategy)

    def both(q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, ...]:
        out, vjp = jax.vjp(forward, q, k, v)
        return out, *vjp(dout)

    compile = lambda function, arguments: jax.jit(function).lower(*[shape] * arguments).compile()
    return compile(forward, 3), compile(both, 4)


def main() -> None:
    task = argument()
    if task["what"] == "compiled":
        answer([compiled_bytes(ranks, task["seq_local"], task["mask"], task["strategy"]) for ranks in task["ranks"]])
    else:
        answer({"torch": torch_peak, "jax": jax_peak}[task["what"]](task["tokens"], task["mask"]))


if __name__ == "__main__":
    main()
