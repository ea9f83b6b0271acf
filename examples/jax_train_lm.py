"""Trains a language model on Python's standard library over a ring, in JAX: what `ring-attn train` does, in one file.

python examples/jax_train_lm.py [steps]

Started again, it resumes from its newest checkpoint. torch_train_lm.py takes the same steps.
"""

import itertools
import sys
import sysconfig
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from ring_attn_jax import Checkpoints, RingTransformer, SequenceShardedDataset, loss

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 100
LENGTH, ROWS, ACCUMULATE, RATE, WARMUP, CLIP = 1024, 2, 2, 3e-3, 10, 1.0

jax.config.update("jax_platforms", "cpu")  # a laptop that plays four devices; on GPUs and TPUs leave out both lines
jax.config.update("jax_num_cpu_devices", 4)
mesh = jax.make_mesh((4,), ("seq",))
jax.set_mesh(mesh)  # before the weights are made
model = RingTransformer(vocab=256, dim=128, depth=2, heads=4, kv_heads=2, mesh=mesh, rngs=nnx.Rngs(0))
rate = optax.warmup_cosine_decay_schedule(RATE / WARMUP, RATE, WARMUP - 1, STEPS, end_value=RATE / 10)
matrices = lambda weights: jax.tree.map(lambda x: x.ndim > 1, weights)
adamw = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1, mask=matrices)
optimizer = nnx.Optimizer(model, optax.chain(optax.clip_by_global_norm(CLIP), adamw), wrt=nnx.Param)
data = SequenceShardedDataset(
    sysconfig.get_path("stdlib"), LENGTH, "zigzag", 4, None, batch_size=ROWS, epochs=None, pattern="*.py", cache="lm-jax/.cache"
)

checkpoints = Checkpoints("lm-jax/checkpoints", keep=2)
progress = checkpoints.resume(model, optimizer)  # every nnx variable; None at the first start
if progress:
    data.resume(progress.data)
batches = iter(data)
there = jax.NamedSharding(mesh, jax.P(None, None, "seq"))  # [microbatch, rows, tokens]


@partial(nnx.jit, donate_argnums=(0, 1))  # new weights and moments are written in place of the old
def train_step(model, optimizer, microbatches):
    graph, weights = nnx.split(model, nnx.Param)
    total = (microbatches["labels"] != -100).sum()  # of all microbatches: each label weighs the same

    def objective(weights, batch):
        model = nnx.merge(graph, weights)
        hidden = model(batch["ids"], batch["positions"], LENGTH, extents=batch["extents"], return_hidden=True)
        return loss(hidden, batch["labels"], head=model.head_weight, reduction="sum", mesh=mesh) / total  # never all logits

    def add(sums, batch):
        return jax.tree.map(jnp.add, sums, jax.value_and_grad(objective)(weights, batch)), None

    nothing = jnp.zeros(()), jax.tree.map(jnp.zeros_like, weights)
    (value, gradients), _ = jax.lax.scan(add, nothing, microbatches)
    optimizer.update(model, gradients)
    return value, optax.tree.norm(gradients)


for step in range(progress.step if progress else 0, STEPS):
    shards = list(itertools.islice(batches, ACCUMULATE))
    names = "ids", "labels", "positions", "extents"
    microbatches = {name: jax.device_put(jnp.stack([getattr(x, name) for x in shards]), there) for name in names}
    value, norm = train_step(model, optimizer, microbatches)
    if step % 10 == 9 or step == 0:
        print(f"step {step + 1}: loss {value:.4f}, norm {norm:.2f}", flush=True)
    if step % 50 == 49:
        checkpoints.save(step + 1, model, optimizer, data=data.state())  # goes on in the background
checkpoints.close()
