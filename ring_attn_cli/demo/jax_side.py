"""The demo in JAX: one process, each rank a CPU device of the host. Imported in that process only."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp

from ring_attn_jax import shard_batch

from ..compare.jax_side import JaxWorker
from ..processes import Report
from ..train.jax_side import JaxTrainer, mesh_of, on_cpus
from . import exactness, training
from .exactness import PARTS, DemoInputs, DemoResult
from .settings import DemoSettings


def work(report: Report, settings: DemoSettings, inputs: DemoInputs) -> None:
    """Compute the demo's attention calls and its training for all ranks in this process, and report each result."""
    config = training.config(settings)
    jax.config.update("jax_platforms", "cpu")
    on_cpus(config, 1)
    worker = JaxWorker(jax.devices())
    for part, order in exactness.orders(settings, "jax").items():
        report("stage", f"attention {PARTS[part]}")
        began, outcome = time.perf_counter(), worker.prepare(order, inputs.of_attention)
        report(part, DemoResult.of(order, [outcome], began))
    report("stage", "training, first compiled")
    trainer = JaxTrainer(config, mesh_of(config))
    shard = lambda text: shard_batch(jnp.asarray(text), settings.layout, settings.ranks)
    training.train(report, settings, lambda number, text: trainer.step(number, [shard(text)]))
