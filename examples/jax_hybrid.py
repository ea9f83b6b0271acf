"""Trains three GatedDeltaNet layers and one of attention on packed documents, over a ring of four CPU devices, in JAX.

python examples/jax_hybrid.py

The documents are arithmetic: each counts in its own steps, so a token follows from the two before it.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from ring_attn_jax import RingTransformer, loss, shard_batch

jax.config.update("jax_platforms", "cpu")  # a laptop that plays four devices; on GPUs and TPUs leave out both lines
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_disable_most_optimizations", True)  # twenty steps take less time than to compile them well
mesh = jax.make_mesh((4,), ("seq",))
jax.set_mesh(mesh)  # before the weights are made: the axes are Explicit, and every array must know its mesh

VOCAB, LENGTHS = 61, (40, 7, 80, 1, 32)  # five documents in a row of 160 tokens; a state ends with its document
mixers = ("gated_delta_net", "gated_delta_net", "gated_delta_net", "attention")
model = RingTransformer(vocab=VOCAB, dim=32, depth=4, heads=4, kv_heads=2, mixers=mixers, mesh=mesh, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


def packed(step):
    """Return two rows of packed documents, and the document of each token."""
    rng = np.random.default_rng(step)
    count = lambda n: (rng.integers(VOCAB) + rng.integers(1, 8) * np.arange(n)) % VOCAB
    ids = np.stack([np.concatenate([count(n) for n in LENGTHS]) for _ in range(2)])
    return jnp.asarray(ids), jnp.asarray(np.repeat(np.arange(len(LENGTHS)), LENGTHS)[None].repeat(2, 0))


@partial(nnx.jit, donate_argnums=(0, 1))  # new weights and moments are written in place of the old
def train_step(model, optimizer, ids, labels, positions, extents):
    objective = lambda model: loss(model(ids, positions, extents=extents), labels, axis_name=None)  # whole arrays: no axis
    value, gradients = nnx.value_and_grad(objective)(model)
    optimizer.update(model, gradients)
    return value


for step in range(20):
    ids, documents = packed(step)
    batch = shard_batch(ids, "zigzag", ranks=4, documents=documents)  # labels and extents stay within a document
    value = train_step(model, optimizer, batch.ids, batch.labels, batch.positions, batch.extents)
    print(f"step {step}: loss {value:.4f}", flush=True)
