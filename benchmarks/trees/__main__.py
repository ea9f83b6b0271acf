"""What does a prompt save that is computed once for all its completions, in attention and in a layer?

    python -m benchmarks.trees [--prompt 16384] [--completions 16] [--length 1024]
    python -m benchmarks.trees --ring                          attention over all GPUs of this host, PyTorch
    python -m benchmarks.trees --ring --cpu 4 --prompt 256 --completions 8 --length 64   on CPU ranks, to see that it runs

One GPU, bfloat16, 32 query heads and 8 key heads of 128. The tree is one row: the prompt, then its completions. Beside it run a
causal row of as many tokens, which shows what rate the kernels reach without key extents, and the rollouts one by one, each with
its own prompt. TFLOP/s count visible pairs. The layer is a block of RingTransformer, dim 4096 with an MLP of 4096, and its memory
is the peak of a call beyond its inputs. All candidates take turns in one process.

Prediction (prompt of 16,384, 16 completions of 1,024):
  The tree has 0.41e9 visible pairs, the 16 rollouts have 2.42e9: 5.9 times less. It has 32,768 tokens in place of 278,528, so
  everything but attention costs 8.5 times less. A query tile of a completion visits the prompt and itself, 1 of its 130 key tiles
  with a mask, and the kernels skip the gap between. So attention should reach 0.95 of the causal row's rate and be 5.6 times
  faster than one by one, and the layer between that and 8.5 times.

Measured: results/trees-h100.json and results/trees-ring-h200-x4.json, discussed in docs/trees.md.

"--ring": the tree in a balanced layout, by several strategies. Beside it the rollouts one by one, each over the ring in zigzag,
or shared out: each GPU computes its part of the rollouts alone, without communication. Times are of all rollouts.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh, PartitionSpec

import ring_attn_jax
from ring_attn_core import causal
from ring_attn_core.data.trees import TreeExtents
from ring_attn_torch import RingTransformer, ring_attention, tree_extents

from ..kernel.candidates import Case, of_jax, of_torch
from ..support import harness
from ..support.turns import Work, peak_bytes, take_turns
from .in_torch import Problem

HEADS: dict[str, Any] = {"heads": 32, "kv_heads": 8}
CHOICES = "causal row", "tree", "one by one"


def attention(options: Namespace, framework: str) -> Iterator[dict[str, Any]]:
    """Yield milliseconds and rates of each pass of attention, and the ratios that the question asks for."""
    tokens = options.prompt + options.completions * options.length
    row, rollout = Case(**HEADS, tokens=tokens), Case(**HEADS, tokens=options.prompt + options.length)
    make = {"torch": _in_torch, "jax": _in_jax}[framework]
    made = {
        "causal row": make(row, None),
        "tree": make(row, _tree(options).key_extents.cuda()),
        "one by one": make(rollout, None),
    }
    pairs = {
        "causal row": causal().area(tokens, tokens),
        "tree": visible(options),
        "one by one": causal().area(*2 * [rollout.tokens]),
    }
    for index, name in enumerate(("forward", "backward")):
        times = take_turns({choice: works[1 + index] for choice, works in made.items()}, options.rounds)
        flops = {choice: row.flops[index] * pairs[choice] / pairs["causal row"] for choice in CHOICES}
        rates = {choice: flops[choice] / times[choice] / 1e12 for choice in CHOICES}
        times["one by one"] *= options.completions
        yield {
            "framework": framework,
            "part": f"attention, {name}",
            **{f"{choice} ms": round(1e3 * times[choice], 3) for choice in CHOICES},
            **{f"{choice} TFLOP/s": round(rates[choice], 1) for choice in CHOICES},
            "tree of causal": round(rates["tree"] / rates["causal row"], 3),
            "faster than one by one": round(times["one by one"] / times["tree"], 2),
        }


def visible(options: Namespace) -> int:
    """Return the number of visible pairs of the tree."""
    own = lambda tokens: causal().area(tokens, tokens)
    return own(options.prompt) + options.completions * (own(options.length) + options.prompt * options.length)


def over_ranks(options: Namespace) -> Iterator[dict[str, Any]]:
    """Yield milliseconds and rates of attention over all GPUs. TFLOP/s are those of a GPU."""
    ranks, dtype = options.cpu or torch.cuda.device_count(), "float32" if options.cpu else "bfloat16"
    case = Case(**HEADS, tokens=1)
    strategies = [name for name in options.strategy if not (options.cpu and name == "push")]
    sizes = options.prompt, options.completions, options.length, case.heads, case.kv_heads, case.dim, options.rounds
    found = harness.run_ranks("benchmarks.trees.in_torch", Problem(*sizes, strategies, dtype), ranks, bool(options.cpu))[0]
    own = causal().area(*2 * [options.prompt + options.length])
    for name, times in found.items():
        pairs = (visible(options) if name.startswith("tree") else options.completions * own) * case.heads * case.dim / ranks
        row: dict[str, Any] = {"framework": "torch", "ranks": ranks, "candidate": name}
        for index, (each, products) in enumerate((("forward", 4), ("backward", 10))):
            row |= {
                f"{each} ms": round(1e3 * times[index], 3),
                f"{each} TFLOP/s": round(products * pairs / times[index] / 1e12, 1),
            }
            row[f"{each}, times shared out"] = round(found["one by one, shared out"][index] / times[index], 2)
        yield row


def _tree(options: Namespace) -> TreeExtents:
    children = options.completions
    return tree_extents([-1] + children * [0], [options.prompt] + children * [options.length])


def _in_torch(case: Case, key_extents: torch.Tensor | None) -> tuple[Work, Work, Work]:
    return of_torch(partial(ring_attention, mask=causal(), key_extents=key_extents), case)


def _in_jax(case: Case, key_extents: torch.Tensor | None) -> tuple[Work, Work, Work]:
    mesh = Mesh(np.array(jax.devices()[:1]), ("seq",))
    given = {} if key_extents is None else {"key_extents": jax.dlpack.from_dlpack(key_extents)}
    inside = lambda q, k, v, given: ring_attn_jax.ring_attention(q, k, v, mask=causal(), **given)
    ring = jax.shard_map(inside, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    return of_jax(lambda q, k, v: ring(q, k, v, given), case)


def layer(options: Namespace) -> Iterator[dict[str, Any]]:
    """Yield the time and peak memory of forward and backward of one block, for the tree and for all rollouts one by one."""
    with torch.device("cuda"):
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"dim": 4096, "hidden": 4096, "depth": 1, **HEADS}
        model = RingTransformer(vocab=256, **sizes, compute_dtype=torch.bfloat16)
        tokens = options.prompt + options.completions * options.length
        found = _tree(options)
        of_tree = {"positions": found.positions.cuda(), "key_extents": found.key_extents.cuda()}
        works = {"tree": _step(model, tokens, of_tree), "one by one": _step(model, options.prompt + options.length, {})}
    times = take_turns(works, options.rounds)
    times["one by one"] *= options.completions
    peaks = {name: peak_bytes(work) for name, work in works.items()}
    yield {
        "framework": "torch",
        "part": "layer",
        **{f"{choice} ms": round(1e3 * times[choice], 3) for choice in times},
        **{f"{choice} peak GB": round(peaks[choice] / 1e9, 2) for choice in peaks},
        "faster than one by one": round(times["one by one"] / times["tree"], 2),
    }


def _step(model: RingTransformer, tokens: int, given: dict[str, torch.Tensor]) -> Callable[[], object]:
    ids, dout = torch.randint(256, (1, tokens)), torch.randn(1, tokens, 4096, dtype=torch.bfloat16)
    weights = list(model.blocks.parameters())
    return lambda: torch.autograd.grad(model(ids, return_hidden=True, **given), weights, dout)


def rows(options: Namespace) -> Iterator[dict[str, Any]]:
    if options.ring:
        yield from over_ranks(options)
        return
    for framework in options.framework:
        yield from attention(options, framework)
    yield from layer(options)


if __name__ == "__main__":
    sizes = {"prompt": 16384, "completions": 16, "length": 1024}
    over: dict[str, Any] = {"ring": False, "cpu": 0, "strategy": ("ring", "direct", "push")}
    options = harness.options(__doc__, framework=[*harness.FRAMEWORKS], **sizes, **over, rounds=7, out="trees-h100")
    harness.record(__doc__, options.out, "rows", rows(options))
