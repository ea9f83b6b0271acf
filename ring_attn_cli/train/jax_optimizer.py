"""The optimizer of a run in JAX, and the options with which its step is compiled. Imported only if JAX is used."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .arithmetic import rates
from .config import Optimizer

SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"
"""The XLA option of a scheduler that would keep offloaded activations on the GPU (docs/checkpointing.md)."""


def adamw(of: Optimizer, steps: int) -> optax.GradientTransformation:
    """Return AdamW with clipping by the global norm and ``arithmetic.rates``. Vectors, such as norms, have no weight decay."""
    table = np.array(rates(of, steps))
    return optax.chain(
        optax.clip_by_global_norm(of.clip),
        optax.scale_by_adam(of.beta1, of.beta2, of.eps),
        optax.add_decayed_weights(of.decay, mask=lambda weights: jax.tree.map(lambda x: x.ndim > 1, weights)),
        optax.scale_by_learning_rate(lambda count: jnp.asarray(table)[count]),
    )


def compiler_options(platform: str, activations: str) -> dict[str, bool] | None:
    """Return the XLA options of a training step, or None: ``SCHEDULER`` is off on a GPU if activations are offloaded."""
    return {SCHEDULER: False} if platform == "gpu" and activations == "offload" else None
