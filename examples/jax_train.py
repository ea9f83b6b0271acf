"""Trains a small transformer with the batch over one mesh axis and the sequence over the other, in JAX.

python examples/jax_train.py
"""

from functools import partial

import jax
import optax
from flax import nnx

from ring_attn_jax import RingTransformer, loss, shard_batch

jax.config.update("jax_platforms", "cpu")  # a laptop that plays four devices; on GPUs and TPUs leave out both lines
jax.config.update("jax_num_cpu_devices", 4)
mesh = jax.make_mesh((2, 2), ("data", "seq"))
jax.set_mesh(mesh)  # before the weights are made: the axes are Explicit, and every array must know its mesh

model = RingTransformer(vocab=256, dim=64, depth=2, heads=4, kv_heads=2, mesh=mesh, batch_axes="data", rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
ids = jax.random.randint(jax.random.key(0), (4, 101), 0, 256)
batch = shard_batch(ids, "zigzag", ranks=2)  # no rank: all shards side by side, in layout order; labels end in -100


@partial(nnx.jit, donate_argnums=(0, 1))  # new weights and moments are written in place of the old
def train_step(model, optimizer, batch_ids, labels, positions):
    objective = lambda model: loss(model(batch_ids, positions, batch.length), labels, axis_name=None)  # whole arrays: no axis
    value, gradients = nnx.value_and_grad(objective)(model)
    optimizer.update(model, gradients)
    return value


for step in range(10):
    value = train_step(model, optimizer, batch.ids, batch.labels, batch.positions)
    print(f"step {step}: loss {value:.4f}")
