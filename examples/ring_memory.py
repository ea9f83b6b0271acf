"""Compares the memory of a layer on a long sequence: the formulas of the Ring Attention paper, and what two frameworks hold.

python examples/ring_memory.py [--lengths 2048 32768] [--ranks 1 2 4 8] [--image ring_memory.png]

Table 1 of Liu et al., "Ring Attention with Blockwise Transformers" (arXiv:2310.01889), has the largest activations of a layer in
bytes of bfloat16: b rows, s tokens, hidden size h, n heads, and in a ring c = s / ranks tokens on a device.

    vanilla                        2 b n s^2   the scores of all heads
    memory-efficient attention     8 b s h     the inner activations of the feed-forward, 4 h numbers a token; no scores exist
    ... and feed-forward           2 b s h     the output of the layer; the feed-forward is computed in chunks too
    ring                           6 b c h     six blocks: q, k and v in use, the next k and v in transfer, the output

Here the same four layers are in float32, so the formulas' bytes are doubled. Two more columns are measured on the layer
``x += attention(x); x += down(gelu(up(x)))`` with its gradients:

    kept, PyTorch   the tensors that autograd saves for the backward, each counted once, without weights. These are all arrays
                    that the gradients of the layer's products need, while a formula has the largest array alone
    peak, JAX       the memory that XLA reserves on a device for forward and backward besides inputs, outputs and weights. At
                    its peak it also holds the gradients of those arrays

XLA reports its memory after compiling, without a run, so any length is quick. PyTorch runs the shortest length only; for a ring
it runs one rank's tokens, because autograd saves no keys of other ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

HIDDEN, HEADS = 128, 2
CHUNK = 128
"""Tokens that the feed-forward takes at a time where it does so in chunks."""

NUMBER = 4
"""Bytes of a number in float32."""


class Layer(NamedTuple):
    """A row of the table: how a layer computes, its formula in the paper, and that in numbers of s and c tokens."""

    scores: bool
    chunks: bool
    ring: bool
    formula: str
    numbers: Callable[[int, int], int]
    colour: str


LAYERS = {
    "vanilla": Layer(True, False, False, "2bns²", lambda s, c: HEADS * s * s, "#E45756"),
    "memory-efficient attention": Layer(False, False, False, "8bsh", lambda s, c: 4 * s * HIDDEN, "#F58518"),
    "... and feed-forward": Layer(False, True, False, "2bsh", lambda s, c: s * HIDDEN, "#54A24B"),
    "ring": Layer(False, True, True, "6bch", lambda s, c: 3 * c * HIDDEN, "#4C78A8"),
}


def compute(x: Any, weights: Any, attention: Callable[..., Any], feed_forward: Callable[..., Any]) -> Any:
    """Return ``x + attention`` and on top of it the feed-forward, x [b s h]; the same for arrays of JAX and of PyTorch."""
    b, s, h = x.shape
    q, k, v = ((x @ weight).reshape(b, s, HEADS, h // HEADS) for weight in weights[:3])
    x = x + attention(q, k, v).reshape(b, s, h) @ weights[3]
    return x + feed_forward(x, *weights[4:])


SHAPES = [(HIDDEN, HIDDEN)] * 4 + [(HIDDEN, 4 * HIDDEN), (4 * HIDDEN, HIDDEN)]
"""Weights: of q, k, v and attention's result, then those of the feed-forward."""


def kept_by_torch(layer: Layer, tokens: int) -> int:
    """Return the bytes that autograd keeps of ``tokens`` tokens, each storage once, weights left out."""
    import torch
    import torch.nn.functional as F
    from torch.autograd.graph import saved_tensors_hooks
    from torch.utils.checkpoint import checkpoint

    from ring_attn_torch import ring_attention

    def vanilla(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        scores = (q @ k.mT).mul(q.shape[-1] ** -0.5).masked_fill(later, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2)

    def feed_forward(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        whole = lambda x: F.gelu(x @ up) @ down
        if not layer.chunks:
            return whole(x)
        return torch.cat([checkpoint(whole, part, use_reentrant=False) for part in x.split(CHUNK, 1)], 1)

    storages: dict[int, torch.UntypedStorage] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    weights = [torch.randn(shape).requires_grad_() for shape in SHAPES]
    x = torch.randn(1, tokens, HIDDEN).requires_grad_()
    with saved_tensors_hooks(keep, lambda x: x):
        compute(x, weights, vanilla if layer.scores else ring_attention, feed_forward)
    own = {weight.untyped_storage().data_ptr() for weight in weights}
    return sum(storage.nbytes() for place, storage in storages.items() if place not in own)


def peak_by_jax(layer: Layer, tokens: int, ranks: int) -> int:
    """Return the bytes that XLA sets aside on a device for forward and backward of ``tokens`` tokens over ``ranks`` devices."""
    import jax
    import jax.numpy as jnp

    from ring_attn_jax import ring_attention

    def vanilla(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("bqnd,bknd->bnqk", q, k) * q.shape[-1] ** -0.5
        earlier = jnp.arange(q.shape[1])[:, None] >= jnp.arange(q.shape[1])
        return jnp.einsum("bnqk,bknd->bqnd", jax.nn.softmax(jnp.where(earlier, scores, -jnp.inf)), v)

    def feed_forward(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        whole = lambda x: jax.nn.gelu(x @ up) @ down
        if not layer.chunks:
            return whole(x)
        parts = x.reshape(-1, min(CHUNK, x.shape[1]), HIDDEN)
        return jax.lax.map(jax.checkpoint(whole), parts).reshape(x.shape)

    def both(x: jax.Array, dout: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
        attention = vanilla if layer.scores else lambda *qkv: ring_attention(*qkv, axis_name="seq")
        out, backward = jax.vjp(lambda x, *weights: compute(x, weights, attention, feed_forward), x, *weights)
        return out, *backward(dout)

    mesh = jax.make_mesh((ranks,), ("seq",), devices=jax.devices()[:ranks])
    shard, whole = jax.P(None, "seq"), jax.P()
    placed = lambda shape, spec: jax.ShapeDtypeStruct(shape, "float32", sharding=jax.NamedSharding(mesh, spec))
    inputs = [placed((1, tokens, HIDDEN), shard)] * 2 + [placed(shape, whole) for shape in SHAPES]
    of_weights = (whole,) * len(SHAPES)
    on_shards = jax.shard_map(both, mesh=mesh, in_specs=(shard, shard, *of_weights), out_specs=(shard, shard, *of_weights))
    analysis = jax.jit(on_shards).lower(*inputs).compile(OPTIONS).memory_analysis()
    assert analysis is not None, "XLA for CPUs has one"
    return analysis.temp_size_in_bytes


OPTIONS = {
    "xla_cpu_enable_concurrency_optimized_scheduler": False,  # in order of least memory, as on a GPU
    "xla_backend_optimization_level": 0,  # nothing is run, so it need not be fast
    "xla_llvm_disable_expensive_passes": True,
}

Peaks = dict[tuple[str, int, int], int]
"""Bytes of (name of a layer, tokens, ranks)."""


def report(peaks: Peaks, length: int, ranks: int) -> Table:
    """Return the table of the paper at one length, with what PyTorch keeps and XLA sets aside."""
    table = Table(title=f"A layer of {length:,} tokens, float32, h={HIDDEN}, n={HEADS}; ring of {ranks}: MiB on a device")
    for heading in ("layer", "in the paper", "paper", "kept, PyTorch", "peak, JAX"):
        table.add_column(heading, justify="left" if heading == "layer" else "right")
    for name, layer in LAYERS.items():
        local = length // ranks if layer.ring else length
        sizes = layer.numbers(length, length // ranks) * NUMBER, kept_by_torch(layer, local)
        mib = [f"{size / 2**20:.2f}" for size in (*sizes, peaks[name, length, ranks if layer.ring else 1])]
        table.add_row(name, layer.formula, *mib)
    return table


def draw(peaks: Peaks, lengths: list[int], rings: list[int]) -> Figure:
    """On the left every layer over the length; on the right the ring over the number of its ranks, at the longest length."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, layer in LAYERS.items():
        ranks = rings[-1] if layer.ring else 1
        by_paper = [layer.numbers(s, s // ranks) * NUMBER / 2**20 for s in lengths]
        label = f"ring of {ranks}" if layer.ring else name
        left.plot(lengths, by_paper, "--", color=layer.colour, lw=1)
        left.plot(lengths, [peaks[name, s, ranks] / 2**20 for s in lengths], "o-", color=layer.colour, label=label)
    ring, longest = LAYERS["ring"], lengths[-1]
    right.plot(rings, [ring.numbers(longest, longest // n) * NUMBER / 2**20 for n in rings], "--", color=ring.colour, lw=1)
    right.plot(rings, [peaks["ring", longest, n] / 2**20 for n in rings], "o-", color=ring.colour)
    for axes, ticks, unit in ((left, lengths, "tokens"), (right, rings, "ranks")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set(xticks=ticks, xticklabels=[f"{tick:,}" for tick in ticks], xlabel=unit, ylabel="MiB on a device")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.spines[["top", "right"]].set_visible(False)
    left.set_title("a layer's activations: XLA's peak; dashed: the paper's formula", size=10)
    right.set_title(f"the ring at {longest:,} tokens", size=10)
    left.legend(frameon=False, fontsize=9)
    return figure


def main() -> None:
    """Measure, print the table and write the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 32768], help="tokens of all ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--image", default="ring_memory.png")
    options = parser.parse_args()
    lengths, rings = sorted(options.lengths), sorted(options.ranks)
    if rings[0] < 1 or any(length < 1 or length % (2 * CHUNK * ranks) for length in lengths for ranks in rings):
        parser.error(f"expected rings of 1 or more, and lengths that are multiples of {2 * CHUNK} tokens a rank")

    import jax

    jax.config.update("jax_num_cpu_devices", rings[-1])
    peaks = {
        (name, length, ranks): peak_by_jax(layer, length, ranks)
        for name, layer in LAYERS.items()
        for length in lengths
        for ranks in (rings if layer.ring else [1])
        if not layer.ring or ranks == rings[-1] or length == lengths[-1]
    }
    Console().print(report(peaks, lengths[0], rings[-1]))
    draw(peaks, lengths, rings).savefig(options.image, dpi=80)
    print(f"written: {options.image}")


if __name__ == "__main__":
    main()
