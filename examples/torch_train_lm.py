"""Trains a language model on Python's standard library over a ring, in PyTorch: what `ring-attn train` does, in one file.

torchrun --nproc-per-node 4 examples/torch_train_lm.py [steps]

Started again, it resumes from its newest checkpoint. jax_train_lm.py takes the same steps.
"""

import itertools
import math
import sys
import sysconfig

import torch
import torch.distributed as dist

from ring_attn_torch import Checkpoints, RingTransformer, SequenceShardedDataset, count_labels, loss, sum_gradients

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 100
LENGTH, ROWS, ACCUMULATE, RATE, WARMUP, CLIP = 1024, 2, 2, 3e-3, 10, 1.0

dist.init_process_group("gloo")  # "nccl" on GPUs
torch.set_num_threads(1)
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # the same weights on every rank
model = RingTransformer(vocab=256, dim=128, depth=2, heads=4, kv_heads=2)
matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == many] for many in (True, False))
optimizer = torch.optim.AdamW(
    [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95)
)
data = SequenceShardedDataset(
    sysconfig.get_path("stdlib"),
    LENGTH,
    "zigzag",
    ranks,
    rank,
    batch_size=ROWS,
    epochs=None,
    pattern="*.py",
    cache="lm-torch/.cache",
)

checkpoints = Checkpoints("lm-torch/checkpoints", keep=2)
progress = checkpoints.resume(model, optimizer)  # weights, moments and generators; None at the first start
if progress:
    data.resume(progress.data)
batches = iter(data)


def rate(step):
    if step < WARMUP:
        return RATE * (step + 1) / WARMUP
    passed = (step - WARMUP) / max(1, STEPS - 1 - WARMUP)
    return RATE * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * passed)))


for step in range(progress.step if progress else 0, STEPS):
    shards = list(itertools.islice(batches, ACCUMULATE))
    total = sum(count_labels(shard.labels) for shard in shards)  # of all ranks and microbatches: each label weighs the same
    optimizer.zero_grad()
    value = 0.0
    for shard in shards:
        hidden = model(shard.ids, shard.positions, shard.length, extents=shard.extents, return_hidden=True)
        part = loss(hidden, shard.labels, head=model.head_weight, reduction="sum") / total  # never all logits at once
        part.backward()
        value += part.item()
    sum_gradients(model)  # once, after the last microbatch
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    for group in optimizer.param_groups:
        group["lr"] = rate(step)
    optimizer.step()
    if rank == 0 and (step % 10 == 9 or step == 0):
        print(f"step {step + 1}: loss {value:.4f}, norm {norm:.2f}", flush=True)
    if step % 50 == 49:
        checkpoints.save(step + 1, model, optimizer, data=data.state())  # goes on in the background
checkpoints.close()
dist.destroy_process_group()
