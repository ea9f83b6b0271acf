"""Trains a small transformer with the batch over one mesh axis and the sequence over the other, in PyTorch.

torchrun --nproc-per-node 4 examples/torch_train.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ring_attn_torch import RingTransformer, loss, shard_batch, sum_gradients

dist.init_process_group("gloo")  # "nccl" on GPUs
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "seq"))
data, seq = mesh.get_local_rank("data"), mesh.get_local_rank("seq")

torch.manual_seed(0)  # the same weights and the same batch on every rank
model = RingTransformer(vocab=256, dim=64, depth=2, heads=4, kv_heads=2, group=mesh["seq"])  # the ring is one axis
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ids = torch.randint(256, (4, 101))

for step in range(10):
    rows = ids.chunk(2)[data]  # this member's rows of the batch
    shard = shard_batch(rows, "zigzag", ranks=2, rank=seq)  # this member's tokens of those rows; labels end in -100
    value = loss(model(shard.ids, shard.positions, shard.length), shard.labels)  # the mean over everybody's tokens
    optimizer.zero_grad()
    value.backward()
    sum_gradients(model)  # each rank has its own part of the gradient: they are summed over everybody, not averaged
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {value.item():.4f}")
dist.destroy_process_group()
