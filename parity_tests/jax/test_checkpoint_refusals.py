"""A checkpoint that is refused in JAX: in every process, in the same words, and with nothing changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import optax
import pytest
from flax import nnx

from ring_attn_jax import Checkpoints
from ring_attn_jax.training.checkpoint_files import CheckpointFiles

from .test_checkpoint import arrays, assert_equal, made

pytest.importorskip("orbax.checkpoint")


def test_a_save_that_cannot_begin_waits_for_the_writes_that_it_has_started(tmp_path, monkeypatch):
    """Else they would fill the folder while the next save deletes it."""
    waited = []

    def begin(files: CheckpointFiles, *_: Any) -> None:
        files._writes = [SimpleNamespace(result=lambda: waited.append(1))]
        raise OSError("No space left on device")

    monkeypatch.setattr(CheckpointFiles, "begin", begin)
    with pytest.raises(OSError, match=r"of step 1 could not be saved, .*: No space left"):
        Checkpoints(tmp_path).save(1, *made())
    assert waited == [1]


class Two(nnx.Module):
    """Two linear maps that may have optimizers of their own."""

    def __init__(self, seed: int, dtype: Any = jax.numpy.float32) -> None:
        self.a, self.b = (nnx.Linear(4, 4, param_dtype=dtype, rngs=nnx.Rngs(seed + i)) for i in range(2))


def of_two(seed: int, transformation: Any, dtype: Any = jax.numpy.float32) -> tuple[Any, Any]:
    model = Two(seed, dtype)
    return model, nnx.Optimizer(model, transformation, wrt=nnx.Param)


def reach_two(model: Two, optimizer: Any) -> None:
    optimizer.update(model, nnx.grad(lambda model: (model.b(model.a(jax.numpy.ones((2, 4)))) ** 2).mean())(model))


OTHERS = {
    "dtype": (
        optax.adam(0.1),
        jax.numpy.bfloat16,
        r"model\.a\.bias is float32 and must be bfloat16; model\.a\.kernel is float32",
    ),
    "class": (
        optax.adamw(0.1),
        jax.numpy.float32,
        r"has states of ScaleByAdamState, .*this one of ScaleByAdamState, .*as it was",
    ),
    "state": (
        optax.adam(0.1, mu_dtype="bfloat16"),
        jax.numpy.float32,
        r"opt_state\.0\.mu\.a\.bias is float32 and must be bfloat16",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_dtype_or_optimizer_is_refused_and_changes_no_bit(name: str, tmp_path):
    transformation, dtype, message = OTHERS[name]
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, *of_two(0, optax.adam(0.1)))
    checkpoints.wait()
    other = of_two(7, transformation, dtype)
    before = arrays(*other)
    with pytest.raises(ValueError, match=message):
        checkpoints.resume(*other)
    assert_equal(arrays(*other), before)
    checkpoints.close()


@pytest.mark.exhaustive
def test_parameters_with_optimizers_of_their_own_are_resumed_to_the_bit(tmp_path):
    labels = lambda params: jax.tree.map_with_path(lambda path, _: path[0].key, params)
    transformation = optax.multi_transform({"a": optax.adamw(0.1), "b": optax.sgd(0.1, momentum=0.9)}, labels)
    whole, resumed = of_two(0, transformation), of_two(7, transformation)
    reach_two(*whole)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, *whole)
    assert checkpoints.resume(*resumed) is not None
    checkpoints.close()
    for each in (whole, resumed):
        reach_two(*each)
    assert_equal(arrays(*resumed), arrays(*whole))


class Experts(nnx.Module):
    """Two linear experts, of which a step reaches one."""

    def __init__(self, seed: int) -> None:
        self.experts = nnx.List([nnx.Linear(4, 4, rngs=nnx.Rngs(seed + i)) for i in range(2)])


def reach(model: Experts, optimizer: Any, chosen: int) -> None:
    loss = lambda model: (model.experts[chosen](jax.numpy.ones((2, 4))) ** 2).mean()
    optimizer.update(model, nnx.grad(loss)(model))


def test_experts_without_a_gradient_are_resumed_to_the_bit(tmp_path):
    def made(seed: int) -> tuple[Any, Any]:
        model = Experts(seed)
        return model, nnx.Optimizer(model, optax.adamw(0.1), wrt=nnx.Param)

    whole, resumed = made(0), made(7)
    reach(*whole, 0)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, *whole)
    checkpoints.close()
    assert Checkpoints(tmp_path).resume(*resumed) is not None
    for chosen in (1, 0):
        reach(*whole, chosen)
        reach(*resumed, chosen)
        assert_equal(arrays(*resumed), arrays(*whole))
