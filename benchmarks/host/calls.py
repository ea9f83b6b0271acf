"""Calls on one GPU: PyTorch eager and compiled, torch's own attention, and JAX jitted."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.sharding import PartitionSpec

import ring_attn_jax
from ring_attn_torch import ring_attention

from .timing import Work, microseconds

TOKENS = 128, 1024, 4096
HEADS, HEAD_DIM = 8, 64
CHAIN = 8
"""Number of calls in one compiled function; the out of each call is the q of the next."""


def calls() -> list[dict[str, Any]]:
    """Return the host microseconds of a call, by tokens and pass."""
    cells = []
    for tokens in TOKENS:
        torch.compiler.reset()
        for name, works in (("forward", _forward(tokens)), ("forward + backward", _both(tokens))):
            times = microseconds(works)
            cells.append({"tokens": str(tokens), "pass": name, **times, "eager / SDPA": times["eager"] / times["SDPA"]})
    return cells


def chain() -> list[dict[str, Any]]:
    """Return the host microseconds of one of ``CHAIN`` calls in a row, eager and as one compiled function."""
    torch.compiler.reset()
    q, k, v, dout = _arrays(TOKENS[0])
    dout = dout.detach()

    def calls(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for _ in range(CHAIN):
            q = ring_attention(q, k, v)
        return q

    candidates = {"eager": calls, "compiled": torch.compile(calls, fullgraph=True)}
    passes = {
        "forward": lambda f: torch.no_grad()(lambda: f(q, k, v)),
        "forward + backward": lambda f: lambda: torch.autograd.grad(f(q, k, v), (q, k, v), dout),
    }
    cells = []
    for name, of in passes.items():
        times = {c: time / CHAIN for c, time in microseconds({c: of(f) for c, f in candidates.items()}, calls=5).items()}
        cells.append({"pass": name, **times, "compiled / eager": times["compiled"] / times["eager"]})
    return cells


def thread() -> list[dict[str, Any]]:
    """Return the host microseconds of forward + backward, with autograd's own thread (the default) and without."""
    cells = []
    for tokens in TOKENS:
        both = {name: work for name, work in _both(tokens).items() if name in ("eager", "SDPA")}
        here = {f"{name}, no thread": _in_this_thread(work) for name, work in both.items()}
        times = microseconds({**both, **here})
        cells.append(
            {"tokens": str(tokens), **times, "eager / SDPA, no thread": times["eager, no thread"] / times["SDPA, no thread"]}
        )
    return cells


def _in_this_thread(work: Work) -> Work:
    def run() -> None:
        with torch.autograd.set_multithreading_enabled(False):
            work()

    return run


def _arrays(tokens: int) -> list[torch.Tensor]:
    shape = 1, tokens, HEADS, HEAD_DIM
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(4)]


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute torch's own attention on arrays in its preferred order, [b h s d]."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _forward(tokens: int) -> dict[str, Work]:
    q, k, v, _ = _arrays(tokens)
    heads_first = [x.detach().transpose(1, 2).contiguous() for x in (q, k, v)]
    compiled = torch.compile(ring_attention, fullgraph=True)
    jq, jk, jv = (jnp.asarray(x.detach().float().cpu().numpy(), jnp.bfloat16) for x in (q, k, v))
    attention = jax.jit(_alone(lambda q, k, v: ring_attn_jax.ring_attention(q, k, v, axis_name="seq")))
    plain = lambda f, *of: torch.no_grad()(lambda: f(*of))
    return {
        "eager": plain(ring_attention, q, k, v),
        "compiled": plain(compiled, q, k, v),
        "SDPA": plain(sdpa, *heads_first),
        "JAX": lambda: attention(jq, jk, jv),
    }


def _both(tokens: int) -> dict[str, Work]:
    q, k, v, dout = _arrays(tokens)
    dout = dout.detach()
    heads_first = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
    of_heads = dout.transpose(1, 2).contiguous()
    compiled = torch.compile(ring_attention, fullgraph=True)
    jq, jk, jv, jdout = (jnp.asarray(x.detach().float().cpu().numpy(), jnp.bfloat16) for x in (q, k, v, dout))

    def gradients(q: Any, k: Any, v: Any, dout: Any) -> Any:
        _, pull = jax.vjp(lambda *of: ring_attn_jax.ring_attention(*of, axis_name="seq"), q, k, v)
        return pull(dout)

    of_jax = jax.jit(_alone(gradients))
    return {
        "eager": lambda: torch.autograd.grad(ring_attention(q, k, v), (q, k, v), dout),
        "compiled": lambda: torch.autograd.grad(compiled(q, k, v), (q, k, v), dout),
        "SDPA": lambda: torch.autograd.grad(sdpa(*heads_first), heads_first, of_heads),
        "JAX": lambda: of_jax(jq, jk, jv, jdout),
    }


def _alone(function: Any) -> Any:
    """Wrap ``function`` in a shard_map over a ring of one."""
    whole, mesh = PartitionSpec(None, "seq"), jax.make_mesh((1,), ("seq",), (jax.sharding.AxisType.Auto,))
    return jax.shard_map(function, mesh=mesh, in_specs=whole, out_specs=whole)
