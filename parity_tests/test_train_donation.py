"""``ring-attn train`` in JAX holds one copy of weights and moments: steps donate them, evaluation and resumption copy none."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ring_attn_cli.train import jax_worker
from ring_attn_cli.train.config import Config
from ring_attn_cli.train.jax_worker import JaxTrainer, make_mesh
from ring_attn_core.model.lora import LoRA
from ring_attn_jax import RingTransformer, save_weights

from .support.selection import first
from .test_train_parity import config_of

pytest.importorskip("orbax.checkpoint")
pytest.importorskip("rich")


WAYS = ("whole", "sharded", "adapters")


def config_in(folder: Path, way: str) -> Config:
    """A run of one block, on two devices if these share the weights; with adapters, of a frozen model."""
    config = config_of(folder, way, 2 if way == "sharded" else 1, 3)
    config = replace(config, model={**config.model, "depth": 1, "alibi": False, "dropout_rate": 0.0})
    if way == "adapters":
        model = {name: x for name, x in config.model.items() if name != "param_dtype"}
        save_weights(RingTransformer(**model, rngs=nnx.Rngs(0)), folder / "base")
        return replace(config, model={}, init_from=str(folder / "base"), lora=LoRA(rank=2))
    return replace(config, model={**config.model, "tied": way == "whole"}, ring=replace(config.ring, weights=way))


@contextmanager
def opened(config: Config) -> Iterator[JaxTrainer]:
    with jax.enable_x64(config.lora is None):
        side = JaxTrainer(config, make_mesh(config))
        side.open()
        yield side
        side.close()


def state_of(side: JaxTrainer) -> list[jax.Array]:
    return jax.tree.leaves(nnx.state((side._model, side._optimizer)))


def places(arrays: list[jax.Array]) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for x in arrays for shard in x.addressable_shards]


@pytest.mark.slow
@pytest.mark.parametrize("way", first(WAYS))
def test_a_step_writes_the_new_state_in_place_of_the_old(way: str, tmp_path: Path):
    """The compiled step aliases each array of model and optimizer, and returns the bits of a step that donates none."""
    with opened(config_in(tmp_path, way)) as side:
        microbatches = list(itertools.islice(iter(side.data), 2))
        graph, state = nnx.split((side._model, side._optimizer))
        rest = side._place(microbatches), jnp.asarray(side._config.seed)
        static = side._static(microbatches[0])
        compiled: Any = side._step.lower(graph, state, *rest, static).compile()
        old = state_of(side)
        held = sum(x.addressable_shards[0].data.nbytes for x in old)
        assert compiled.memory_analysis().alias_size_in_bytes == held
        assert compiled.as_text().split("entry_computation_layout")[0].count("may-alias") == len(old)
        expected = jax.jit(jax_worker._step, static_argnames=("graph", "static"))(graph, state, *rest, static)
        found = compiled(state, *rest)
        assert all(x.is_deleted() for x in old)
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.slow
def test_an_evaluation_copies_no_weight_and_a_resumption_frees_the_first_ones(tmp_path: Path):
    with opened(config_in(tmp_path, "whole")) as side:
        (microbatch,) = itertools.islice(side.held_out, 1)
        old = places(state_of(side))
        assert len(list(side.losses(microbatch, [40, 120]))) == 2
        assert len(side.wrong(microbatch)) == side._config.rows
        assert places(state_of(side)) == old
        expected = [np.array(x) for x in state_of(side)]
        assert side.resume() is None
        side.save(1, side.data.state())
        side._checkpoints.wait()
        first = state_of(side)
        progress = side.resume()
        assert progress is not None and progress.step == 1
        assert all(x.is_deleted() for x in first)
        for x, y in zip(state_of(side), expected, strict=True):
            np.testing.assert_array_equal(x, y)
