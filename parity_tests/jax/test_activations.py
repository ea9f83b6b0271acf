"""Blocks that keep little: the same gradients, one ring in the forward, and what waits in host memory meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ring_attn_jax import RingTransformer
from ring_attn_jax.layers.activations import HOST

from ..support.models import LENGTH, TRANSFORMER, assert_near, token_ids, transformer_weights
from ..support.selection import first
from .models import loaded, sharded, to_numpy, transformer_step
from .ring import mesh_of

LITTLE = ["recompute", "offload"]
SIZES: dict[str, Any] = TRANSFORMER | {"sinks": True, "dropout_rate": 0.2}
BLOCK = 4
"""The number of arrays that a block keeps: its input, out, lse and the rest of lse."""


def step_of(ranks: int, activations: str, whole: bool = False) -> tuple[RingTransformer, Callable[..., Any], tuple[Any, ...]]:
    """A transformer, its training step, and what that takes besides the parameters."""
    ids, labels = token_ids()
    model, step = transformer_step(ranks, "zigzag", LENGTH, whole, **SIZES, activations=activations)
    return model, step, (sharded(ranks, "zigzag", ids=ids, labels=labels), 7)


@cache
def gradients(ranks: int, activations: str) -> dict[str, np.ndarray]:
    """The loss, and the gradient of every weight."""
    model, step, rest = step_of(ranks, activations)
    (value, _), found = step(loaded(model, transformer_weights(**SIZES), ranks), *rest)
    nnx.update(model, found)
    return {"loss": np.asarray(value), **to_numpy(model)}


@pytest.mark.parametrize(
    ("ranks", "activations"), first([(2, "offload"), (2, "recompute"), (1, "offload"), (4, "offload")], 0, 2)
)
def test_gradients_are_the_same(ranks, activations):
    assert_near(gradients(ranks, activations), gradients(ranks, "keep"), 1e-6)


def traced(activations: str, whole: bool) -> str:
    """The program of a training step on two ranks."""
    model, step, rest = step_of(2, activations, whole)
    return str(jax.make_jaxpr(step)(nnx.state(model, nnx.Param), *rest))


@pytest.mark.slow
@pytest.mark.parametrize("whole", first([True, False]), ids=["whole arrays", "inside shard_map"])
def test_no_ring_runs_again_and_what_blocks_keep_goes_to_the_host_and_back(whole):
    programs = {activations: traced(activations, whole) for activations in ("keep", *LITTLE)}
    hops = {activations: program.count("ppermute[") for activations, program in programs.items()}
    assert hops["keep"] > 0
    assert set(hops.values()) == {hops["keep"]}
    moved = {activations: program.count("device_put[") for activations, program in programs.items()}
    assert moved == {"keep": 0, "recompute": 0, "offload": 2 * BLOCK * SIZES["depth"]}


KINDS_OF_RESULTS = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="looks at where results lie")


@pytest.mark.parametrize("activations", ["recompute", pytest.param("offload", marks=KINDS_OF_RESULTS)])
def test_a_block_keeps_its_input_out_and_lse_alone(activations):
    model = RingTransformer(**TRANSFORMER, mesh=mesh_of(1), activations=activations, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model, nnx.Param)
    ids = jnp.zeros((3, 50), jnp.int32)

    @jax.jit
    def kept(state: nnx.State) -> Any:
        _, vjp = jax.vjp(lambda state: nnx.merge(graph, state)(ids), state)
        return [x for x in jax.tree.leaves(vjp) if hasattr(x, "shape")]

    arrays = [x for x in kept(state) if x.shape[:2] == (3, 50) and x.dtype == jnp.float32]
    found = Counter((x.shape[2:], x.sharding.memory_kind == HOST) for x in arrays)
    dim, depth, offloaded = TRANSFORMER["dim"], TRANSFORMER["depth"], activations == "offload"
    of_final_norm = {((dim,), False): 4, ((1,), False): 2}  # and of the head
    of_a_block = ((dim,), (4, 8), (4,), (4,))  # its input, out, lse and the rest of lse
    assert found - Counter(of_final_norm) == Counter([(shape, offloaded) for shape in of_a_block] * depth)


def test_a_device_without_pinned_memory_is_refused_by_name():
    bare = SimpleNamespace(device_kind="abacus", addressable_memories=lambda: [SimpleNamespace(kind="beads")])
    model = RingTransformer(**TRANSFORMER, mesh=mesh_of(1), activations="offload", rngs=nnx.Rngs(0))
    message = "needs memory of the kind 'pinned_host', and abacus has beads: use activations=\"recompute\""
    with patch.object(jax, "local_devices", lambda: [bare]), pytest.raises(ValueError, match=message):
        model(jnp.zeros((1, 4), jnp.int32))
