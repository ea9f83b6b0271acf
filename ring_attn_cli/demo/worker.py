"""The demo's training in one process: a rank in PyTorch, or all ranks in JAX. Frameworks are imported in their processes only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..processes import Worker
from ..train.loop import TrainStep
from .settings import DemoSettings

Step = Callable[[int, np.ndarray], TrainStep]


def work(worker: Worker, framework: str, rank: int, settings: DemoSettings, store: str) -> None:
    """Make a trainer; on a message, train on consecutive stretches of text, one for each step. Rank 0 reports each loss."""
    with {"PyTorch": _in_torch, "JAX": _in_jax}[framework](rank, settings, store) as step:
        worker.recv()
        for number in range(settings.steps):
            loss = step(number, settings.batch(number)).loss
            if rank == 0:
                worker("loss", loss)


@contextmanager
def _in_torch(rank: int, settings: DemoSettings, store: str) -> Iterator[Step]:
    import torch
    import torch.distributed as dist

    from ring_attn_torch import shard_batch

    from ..train.torch_ranks import CPU, member
    from ..train.torch_worker import RankPlace, TorchTrainer

    torch.set_num_threads(1)
    with member(CPU, rank, settings.ranks, store, settings.patience):
        world: Any = dist.group.WORLD
        trainer = TorchTrainer(settings.config, RankPlace(world, world, 0, CPU))
        shard = lambda text: shard_batch(torch.from_numpy(text), settings.layout, settings.ranks, rank)
        yield lambda number, text: trainer.step(number, [shard(text)])


@contextmanager
def _in_jax(rank: int, settings: DemoSettings, store: str) -> Iterator[Step]:
    import jax
    import jax.numpy as jnp

    from ring_attn_jax import shard_batch

    from ..train.jax_mesh import make_mesh
    from ..train.jax_worker import JaxTrainer

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", settings.ranks)
    trainer = JaxTrainer(settings.config, make_mesh(settings.config))
    shard = lambda text: shard_batch(jnp.asarray(text), settings.layout, settings.ranks)
    yield lambda number, text: trainer.step(number, [shard(text)])
