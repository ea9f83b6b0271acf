"""Trains and scores with a small transformer whose results have the same bits on 1, 2 and 4 ranks, in PyTorch.

    torchrun --nproc-per-node 1 examples/torch_same_bits.py
    torchrun --nproc-per-node 4 examples/torch_same_bits.py

Attention and the loss add in global order. The bits of a matrix product depend on its shape, so everything between two calls of
attention runs on slices of ``SLICE`` tokens, cut at fixed positions. The gradients of a weight are added slice by slice in a
binary tree, first those of a rank, then those of all ranks. That wants the layout "contiguous", and powers of two as counts.

In the end a generator, which fills a cache ``CHUNK`` tokens at a time, computes the log-probabilities of the trained rows, to the
bits of the trainer's.
"""

import hashlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import silu

from ring_attn_torch import CacheSizes, KVCache, loss, prefill, ring_attention, shard_batch, token_log_probs

SLICE, CHUNK, LENGTH = 32, 128, 256
VOCAB, DIM, DEPTH, HEADS, KV_HEADS, HEAD_DIM = 256, 64, 2, 4, 2, 16


def tree_sum(parts: list[Tensor]) -> Tensor:
    """Add neighbours, then neighbouring sums, until one is left."""
    while len(parts) > 1:
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


class InSlices(torch.autograd.Function):
    """``run(x, *more)`` for tensors [batch, tokens, ...], slice by slice. The backward computes each slice again."""

    @staticmethod
    def forward(ctx, run: nn.Module, count: int, *arrays: Tensor) -> Tensor:
        ctx.run, ctx.count = run, count
        ctx.save_for_backward(*arrays)
        slices = zip(*(x.split(SLICE, dim=1) for x in arrays[:count]), strict=True)
        return torch.cat([run(*part) for part in slices], dim=1)

    @staticmethod
    def backward(ctx, *dout: Tensor) -> tuple:
        arrays, weights = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        gradients = []
        for *part, grad in zip(*(x.split(SLICE, dim=1) for x in (*arrays, *dout)), strict=True):
            part = [x.detach().requires_grad_(x.is_floating_point()) for x in part]
            wanted = [x for x in part if x.requires_grad]
            with torch.enable_grad():
                found = list(torch.autograd.grad(ctx.run(*part), (*wanted, *weights), grad))
            gradients.append([*(found.pop(0) if x.requires_grad else None for x in part), *found])
        columns = list(zip(*gradients, strict=True))
        joined = [None if column[0] is None else torch.cat(column, dim=1) for column in columns[: ctx.count]]
        return None, None, *joined, *(tree_sum(list(column)) for column in columns[ctx.count :])


def in_slices(run: nn.Module, *arrays: Tensor) -> Tensor:
    """Return ``run(*arrays)`` [batch, tokens, ...], computed on slices of ``SLICE`` tokens."""
    return InSlices.apply(run, len(arrays), *arrays, *run.parameters())  # type: ignore[return-value]


class BeforeAttention(nn.Module):
    """Queries, keys and values of all heads, [batch, tokens, heads + 2 kv_heads, head_dim]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project = nn.RMSNorm(DIM), nn.Linear(DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.norm(x)).unflatten(-1, (-1, HEAD_DIM))


class AfterAttention(nn.Module):
    """The rest of a block: the output projection, then a SwiGLU feed-forward, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.norm = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False), nn.RMSNorm(DIM)
        self.gate, self.up, self.down = (nn.Linear(a, b, bias=False) for a, b in ((DIM, 128), (DIM, 128), (128, DIM)))

    def forward(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.project(attended.flatten(2))
        inside = self.norm(x)
        return x + self.down(silu(self.gate(inside)) * self.up(inside))


class Model(nn.Module):
    """A decoder whose order of tokens comes from ALiBi. It returns logits [batch, tokens, vocab] of a shard of ids."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, DIM), nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, VOCAB, bias=False))
        self.blocks = nn.ModuleList(nn.ModuleList([BeforeAttention(), AfterAttention()]) for _ in range(DEPTH))
        self.slopes = nn.Buffer(2.0 ** -torch.arange(1.0, HEADS + 1))

    def forward(self, ids: Tensor, cache: KVCache | None = None) -> Tensor:
        x, attention = in_slices(self.embed, ids), {"length": LENGTH, "alibi_slopes": self.slopes, "order": "global"}
        step = cache and cache.prefill_step(ids.shape[1], "contiguous")
        for layer, (before, after) in enumerate(self.blocks):  # type: ignore[misc]
            q, k, v = in_slices(before, x).split((HEADS, KV_HEADS, KV_HEADS), dim=2)
            if cache is None:
                out = ring_attention(q, k, v, layout="contiguous", **attention)
            else:
                out, _ = prefill(q, k, v, cache, layer, step, **attention)
            x = in_slices(after, x, out)
        if cache is not None:
            cache.advance(step)
        return in_slices(self.head, x)


def of_all_ranks(x: Tensor) -> list[Tensor]:
    """Return every rank's ``x``, in the order of the ranks."""
    everyones = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, x.contiguous())
    return everyones


def add_over_ranks(model: nn.Module) -> None:
    """Add each gradient over the ranks, in the order of a binary tree."""
    for weight in model.parameters():
        weight.grad = tree_sum(of_all_ranks(weight.grad))  # type: ignore[arg-type]


@torch.no_grad()
def log_probs(model: Model, ids: Tensor, chunk: int, cache: KVCache | None = None) -> Tensor:
    """Return the log-probability of each token's next one, [batch, tokens], computed ``chunk`` tokens of all ranks at a time."""
    ranks, rank, values = dist.get_world_size(), dist.get_rank(), []
    labels = shard_batch(ids, "contiguous", 1, 0).labels
    for first in range(0, LENGTH, chunk):
        mine = slice(first + rank * chunk // ranks, first + (rank + 1) * chunk // ranks)
        values += of_all_ranks(token_log_probs(model(ids[:, mine], cache), labels[:, mine]))
    return torch.cat(values, dim=1)


def bits(tensors: list[Tensor]) -> str:
    """Return a fingerprint of the bits of tensors."""
    return hashlib.sha256(b"".join(x.detach().cpu().view(torch.uint8).numpy().tobytes() for x in tensors)).hexdigest()[:16]


def train(device: str, dtype: torch.dtype, show: Callable[[str], None], steps: int = 3) -> None:
    """Train on random rows; show each step's loss, and fingerprints of the gradients, of the weights and of log-probabilities."""
    torch.manual_seed(0)  # the same weights and rows on every rank
    model = Model().to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.randint(VOCAB, (2, LENGTH)).to(device)
    shard = shard_batch(ids, "contiguous", dist.get_world_size(), dist.get_rank())
    for step in range(steps):
        value = loss(model(shard.ids), shard.labels, order="global")
        optimizer.zero_grad()
        value.backward()
        add_over_ranks(model)
        gradients = bits([weight.grad for weight in model.parameters()])  # type: ignore[misc]
        optimizer.step()
        show(f"step {step}: loss {value.item():.9f}, gradients {gradients}, weights {bits(list(model.parameters()))}")
    cache = KVCache.make(CacheSizes(DEPTH, KV_HEADS, HEAD_DIM), batch=2, capacity=LENGTH, dtype=dtype, device=device)
    trainer, generator = log_probs(model, ids, LENGTH), log_probs(model, ids, CHUNK, cache)
    show(f"log-probabilities: trainer {bits([trainer])}, generator {bits([generator])}")


if __name__ == "__main__":
    on_gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpus else "gloo")
    device = f"cuda:{dist.get_rank()}" if on_gpus else "cpu"
    train(device, torch.bfloat16 if on_gpus else torch.float32, print if dist.get_rank() == 0 else lambda line: None)
    dist.destroy_process_group()
