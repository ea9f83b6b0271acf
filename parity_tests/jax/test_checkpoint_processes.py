"""A checkpoint that one of two JAX processes refuses, or cannot read or write, is every process's error."""

from __future__ import annotations

import pytest

from .two_processes import said_by_two

for package in ("jax", "flax.nnx", "optax", "orbax.checkpoint"):
    pytest.importorskip(package)


PROCESS = """
import sys
from types import SimpleNamespace
import jax
address, process = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(address, 2, process)
import jax.numpy as jnp
import optax
from flax import nnx
from orbax.checkpoint import PyTreeCheckpointHandler as Handler
from ring_attn_core.model import checkpoint_folder
from ring_attn_jax import Checkpoints, RingTransformer, save_weights

mesh = jax.make_mesh((4,), ("seq",))
placed = jax.NamedSharding(mesh, jax.P("seq"))


def made(fill, width=4):
    model = nnx.Linear(8, width, rngs=nnx.Rngs(0), use_bias=False)
    model.kernel.set_value(jax.make_array_from_callback((8, width), placed, lambda i: fill * jnp.ones((8, width))[i]))
    return model


def tell(what):
    with open(f"said-{process}", "a") as file:
        print(what, file=file)


checkpoint_folder.LAG = 1.0
try:
    Checkpoints(f"own-{process}").save(1, made(1.0))
    tell("saved")
except ValueError as error:
    tell(error)
checkpoints = Checkpoints("shared")
checkpoints.save(1, made(3.0))
checkpoints.wait()
tell(checkpoints.steps())
try:
    checkpoints.resume(made(1.0, 5 if process else 4))
    tell("resumed")
except ValueError as error:
    tell(error)
for case in ("step", "optimizer", "more", "shape"):
    other, model = process == 1, made(1.0, 5 if process and case == "shape" else 4)
    optimizer = None if other and case == "optimizer" else nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    more = {"x": jax} if other and case == "more" else {}
    try:
        checkpoints.save(4 if other and case == "step" else 3, model, optimizer, more=more)
        tell("saved")
    except ValueError as error:
        tell(error)
for case in ("module", "vocab"):
    model = RingTransformer(vocab=37 if process and case == "vocab" else 31, dim=8, depth=1, heads=2, rngs=nnx.Rngs(0))
    try:
        save_weights(made(1.0) if process and case == "module" else model, "weights")
        tell("saved")
    except ValueError as error:
        tell(error)
def gone(*_, **__):
    raise OSError("the disk is gone")


async def later(*_, **__):
    return [SimpleNamespace(result=gone)]


model, right = made(1.0), dict(vars(Handler))
for name, wrong in (("restore", gone), ("async_save", gone), ("async_save", later)):
    if process:
        setattr(Handler, name, wrong)
    try:
        if name == "restore":
            checkpoints.resume(model)
        else:
            checkpoints.save(3, model)
            checkpoints.wait()
        tell("no error")
    except (OSError, ValueError) as error:
        tell("OSError" if wrong is later else error)
    setattr(Handler, name, right[name])
assert (model.kernel.get_value().addressable_shards[0].data == 1).all()
checkpoints.save(3, made(4.0))
checkpoints.wait()
tell(checkpoints.steps())
checkpoints.resume(model)
assert all((shard.data == 4).all() for shard in model.kernel.get_value().addressable_shards)
checkpoints.close()
"""


OBJECTIONS = (
    "step is 3 in process 0, 4 in process 1: all processes must make the same calls",
    "optimizer is 'EmptyState, EmptyState' in process 0, None in process 1: all processes must make the same calls",
    "process 1: more must be a dict that JSON can hold",
    "1 of 2 entries are not the same everywhere: model.kernel is Array float32 [8, 4] on process 0, Array float32 [8, 5] on",
    "process 1: weights are saved of a RingTransformer, got Linear",
    "1 of 11 entries are not the same everywhere: embed.weight is Array float32 [31, 8] on process 0",
    "process 1: {folder}/step_1 is damaged (the disk is gone): delete this folder to resume from the one before",
    "the checkpoint of step 3 could not be saved, and those before it are as they were: process 1: the disk is gone",
    "OSError",
    "[1, 3]",
)


@pytest.mark.exhaustive
def test_processes_that_share_no_folder_or_object_to_a_checkpoint_all_raise_the_same(tmp_path):
    """Two processes of two devices each, whose sharded arrays are saved and resumed in the end."""
    said = said_by_two(PROCESS, tmp_path)
    for first, second in zip(*said, strict=True):
        assert first.replace("own-0", "own-1") == second
    assert "process 1 cannot see " in said[0][0]
    assert said[0][1] == "[1]"
    assert "process 1: " in said[0][2]
    assert "kernel is [8, 4] and must be [8, 5]" in said[0][2]
    for line, expected in zip(said[0][3:], OBJECTIONS, strict=True):
        assert line.startswith(expected.format(folder=tmp_path / "shared") if "{folder}" in expected else expected), line
    assert not (tmp_path / "weights").exists()
