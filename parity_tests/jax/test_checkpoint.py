"""Checkpoints of a run in JAX: exact to the bit after a kill, on one device or on shards over a mesh."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from ring_attn_jax import Checkpoints, RingTransformer, save_weights

from ..support.models import TRANSFORMER
from .ring import mesh_of

pytest.importorskip("orbax.checkpoint")


STEPS = 5
WIDE = 200_000
"""A width whose arrays take longer to write than the next step to begin."""
# Of tasks that orbax leaves when a read or a write fails: they end when they are collected, which may be in a later test.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


@pytest.fixture(autouse=True, scope="module")
def collected() -> Iterator[None]:
    """Collect orbax's garbage before another file's tests begin."""
    yield
    gc.collect()


class Noisy(nnx.Module):
    """A linear map and a generator that its training draws from."""

    def __init__(self, seed: int, width: int = 8) -> None:
        self.map = nnx.Linear(width, 4, rngs=nnx.Rngs(seed))
        self.rngs = nnx.Rngs(seed)


def made(seed: int = 0, width: int = 8) -> tuple[Any, Any]:
    model = Noisy(seed, width)
    return model, nnx.Optimizer(model, optax.adamw(optax.cosine_decay_schedule(1e-2, 10)), wrt=nnx.Param)


def step(model: Noisy, optimizer: Any) -> None:
    x = jax.random.normal(model.rngs(), (3, model.map.in_features))
    optimizer.update(model, nnx.grad(lambda model: jnp.square(model.map(x)).mean(), argnums=nnx.DiffState(0, nnx.Param))(model))


train_step, donating_step = nnx.jit(step), nnx.jit(step, donate_argnums=(0, 1))


def arrays(*modules: Any) -> list[np.ndarray]:
    leaves = jax.tree.leaves([nnx.state(each) for each in modules])
    return [np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in leaves]


def run(folder: Path | None, seed: int = 0, last: int = STEPS) -> list[np.ndarray]:
    """Everything after a run that resumes, if it can, and saves after every step."""
    model, optimizer = made(seed)
    checkpoints = None if folder is None else Checkpoints(folder)
    progress = checkpoints and checkpoints.resume(model, optimizer)
    for step in range(progress.step if progress else 0, last):
        train_step(model, optimizer)
        if checkpoints is not None:
            checkpoints.save(step + 1, model, optimizer, data=json.dumps({"batch": step}))
    if checkpoints is not None:
        checkpoints.close()
    return arrays(model, optimizer)


def assert_equal(got: list[np.ndarray], expected: list[np.ndarray]) -> None:
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_resumed_run_ends_in_the_same_bits(tmp_path):
    run(tmp_path, last=3)
    assert_equal(run(tmp_path, seed=1), run(None))
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.steps() == [3, 4, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step_3", "step_4", "step_5"]
    model, optimizer = made(2)
    assert checkpoints.resume(model, optimizer) == (5, json.dumps({"batch": 4}), {})
    checkpoints.close()


def test_a_save_reads_no_array_after_it_returns(tmp_path):
    """The next step donates them, or they are deleted; a resumption needs no value of theirs either."""
    model, optimizer = made(0, WIDE)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, model, optimizer)
    donating_step(model, optimizer)
    checkpoints.save(2, model, optimizer)
    for x in jax.tree.leaves([nnx.state(model, nnx.Param), nnx.state(optimizer)]):
        x.delete()
    checkpoints.wait()
    with pytest.raises(
        ValueError, match=r"^model\.map\.\w+ was deleted, as a donated array is: pass the one that took its place"
    ):
        checkpoints.save(3, model, optimizer)
    expected = made(0, WIDE)
    for number in (1, 2):
        other = made(number, WIDE)
        for x in jax.tree.leaves(nnx.state(other[1])):
            x.delete()
        if number == 1:
            (tmp_path / "step_2").rename(tmp_path / "put_aside")
        checkpoints.resume(*other)
        assert_equal(arrays(*other), arrays(*expected))
        if number == 1:
            (tmp_path / "put_aside").rename(tmp_path / "step_2")
            train_step(*expected)
    checkpoints.resume(model, optimizer)
    assert_equal(arrays(model, optimizer), arrays(*expected))
    checkpoints.close()


def test_weights_that_were_deleted_are_named_and_nothing_is_saved(tmp_path):
    model = RingTransformer(**TRANSFORMER, rngs=nnx.Rngs(0))
    model.embed.embedding.get_value().delete()
    with pytest.raises(ValueError, match=r"^embed\.\w+ was deleted, as a donated array is: pass the one that took its place"):
        save_weights(model, tmp_path / "weights")
    assert not [*tmp_path.iterdir()]


def test_a_damaged_or_foreign_checkpoint_is_named_and_changes_nothing(tmp_path):
    run(tmp_path, last=2)
    model, optimizer = made(5)
    before = arrays(model, optimizer)
    with pytest.raises(
        ValueError, match=r"step_2 holds does not fit this module: .*model\.map\.kernel is \[8, 4\] and must be \[9, 4\]"
    ):
        Checkpoints(tmp_path).resume(*made(0, width=9))
    with pytest.raises(ValueError, match=r"model\.kernel is missing"):
        Checkpoints(tmp_path).resume(nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"optimizer must be an nnx module, got .*nnx\.Variable\(x\).*nnx\.Optimizer"):
        Checkpoints(tmp_path).resume(model, optax.adamw(1e-2))  # type: ignore
    for damage, message in (
        (lambda x: x[:-1] + bytes([x[-1] ^ 1]), "is damaged, its SHA-256 is not that of the file"),
        (lambda x: x[:-5], "is truncated or damaged, it had .*delete .*step_2 to"),
    ):
        for file in (tmp_path / "step_2").rglob("*"):
            if file.is_file() and "d" in file.parent.parts:
                file.write_bytes(damage(file.read_bytes()))
        with pytest.raises(ValueError, match=rf"step_2/state/.* {message}"):
            Checkpoints(tmp_path).resume(model, optimizer)
        assert_equal(arrays(model, optimizer), before)
    (tmp_path / "step_2").rename(tmp_path / "put_aside")
    progress = Checkpoints(tmp_path).resume(model, optimizer)
    assert progress is not None and progress.step == 1


def test_shards_are_resumed_on_another_mesh(tmp_path):
    model, optimizer = made()
    placed = lambda ranks: jax.NamedSharding(mesh_of(ranks), jax.P("seq"))
    model.map.kernel.set_value(jax.device_put(model.map.kernel.get_value(), placed(4)))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, model, optimizer)
    other, fresh = made(1)
    other.map.kernel.set_value(jax.device_put(other.map.kernel.get_value(), placed(2)))
    checkpoints.resume(other, fresh)
    assert other.map.kernel.get_value().sharding == placed(2)
    assert_equal(arrays(other, fresh), arrays(model, optimizer))
    checkpoints.close()


KILLED = """
import os, pathlib, signal, sys, threading
from parity_tests.jax.test_checkpoint import Checkpoints, made, train_step

folder, delay = pathlib.Path(sys.argv[1]), float(sys.argv[2])
model, optimizer = made(1)
checkpoints = Checkpoints(folder)
progress = checkpoints.resume(model, optimizer)
first = progress.step if progress else 0
train_step(model, optimizer)
checkpoints.save(first + 1, model, optimizer)
checkpoints.wait()
train_step(model, optimizer)
threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
checkpoints.save(first + 2, model, optimizer)
threading.Event().wait()
"""


@pytest.mark.exhaustive
def test_a_run_killed_while_it_saves_ends_in_the_same_bits(tmp_path):
    """Two kills, at different moments of a save; each leaves the checkpoint of the step before, or of that step."""
    run(tmp_path, last=1)
    for delay in (0.01, 0.05):
        command = [sys.executable, "-c", KILLED, str(tmp_path), str(delay)]
        done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
        assert done.returncode == -9, done.stderr
    assert Checkpoints(tmp_path).steps()[-1] >= 3
    assert_equal(run(tmp_path, seed=3, last=8), run(None, last=8))
