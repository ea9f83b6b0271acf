"""``check_ranks``: copies that differ are named with their devices or processes; what is equal, or has no copies, passes."""

# pyright: reportArgumentType=false

from __future__ import annotations

import math
import re
import shutil
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from ring_attn_core import Run, causal
from ring_attn_jax import RingTransformer, check_ranks, save_weights, shard_batch

from .ring import REPLICATED, mesh_of
from .two_processes import said_by_two


def copies(values, spec=REPLICATED, ranks=4):
    """An array over the mesh of which each device holds what it is given, whatever the sharding claims."""
    shards = [jax.device_put(x, device) for x, device in zip(values, jax.devices(), strict=False)]
    sharding = NamedSharding(mesh_of(ranks), spec)
    shape = tuple(size * (ranks if axis else 1) for size, axis in zip(shards[0].shape, [*spec, *[None] * 9], strict=False))
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def replicated(what):
    return jax.device_put(what, NamedSharding(mesh_of(4), REPLICATED))


def everything() -> dict[str, Any]:
    """One of each that can be compared, NaNs and empty ones among them."""
    arrays = [jnp.full((2, 3), math.nan), jnp.ones(3, jnp.bfloat16), jnp.asarray(True), jnp.ones((0, 2)), jax.random.key(3)]
    return {
        "model": replicated(nnx.Linear(4, 3, rngs=nnx.Rngs(0))),
        "dropout": nnx.Dropout(0.1, rngs=nnx.Rngs(0)),
        "arrays": replicated(arrays),
        "here": arrays,
        "sharded": jax.device_put(jnp.arange(8), NamedSharding(mesh_of(4), PartitionSpec("seq"))),
        "shard": shard_batch(jnp.arange(8)[None], "zigzag", 2, 1),
        "numpy": {"seed": np.int64(3), "array": np.ones((2, 2), np.float16)},
        "plain": [1, 0.5, math.nan, "zigzag", True, None, causal(), Run(0, 4)],
    }


def test_equal_values_pass():
    check_ranks(everything())
    check_ranks(nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0))))


def test_a_weight_that_a_device_changed_is_named():
    def update(weight):
        return weight + 1e-7 * (jax.lax.axis_index("seq") == 2)

    step = jax.jit(jax.shard_map(update, mesh=mesh_of(4), in_specs=REPLICATED, out_specs=REPLICATED, check_vma=False))
    what = everything()
    check_ranks(what)
    what["model"].kernel[...] = step(what["model"].kernel[...])
    message = (
        r"^1 of \d+ entries are not the same everywhere: model.kernel \(Array float32 \[4, 3\]\) is #\w{16} on devices 0, 1, 3, "
        r"#\w{16} on device 2\. Put one device's values"
    )
    with pytest.raises(ValueError, match=message):
        check_ranks(what)
    what["model"].kernel[...] = replicated(np.asarray(what["model"].kernel[...]))
    check_ranks(what)


NAN = np.full(2, math.nan, np.float32)
OTHER_NAN = (NAN.view(np.int32) + 1).view(np.float32)
DIFFERENT: dict[str, Any] = {
    "a seed": (lambda: copies([7, 7, 8, 7]), r"x \(Array int32 \[\]\) is 7 #\w+ on devices 0, 1, 3, 8 #\w+ on device 2"),
    "a key": (
        lambda: copies([jax.random.key(n) for n in (0, 1, 0, 2)]),
        r"x \(Array key<fry> \[\]\) is #\w+ on devices 0, 2, #\w+ on device 1, #\w+ on device 3",
    ),
    "a NaN's bits": (lambda: copies([NAN, NAN, NAN, OTHER_NAN]), r"x .* on devices 0, 1, 2, #\w+ on device 3"),
    "a zero's sign": (lambda: copies([np.zeros(2), -np.zeros(2)] * 2), r"x .* on devices 0, 2, #\w+ on devices 1, 3"),
    "bfloat16": (lambda: copies([jnp.full(2, n, jnp.bfloat16) for n in (1, 1, 1, 2)]), r"x \(Array bfloat16 \[2\]\) is"),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_copies_that_differ_are_named_with_their_devices(case):
    make, message = DIFFERENT[case]
    with pytest.raises(ValueError, match=f"^1 of 2 entries are not the same everywhere: {message}"):
        check_ranks({"same": copies([NAN] * 4), "x": make()})


def test_the_devices_that_hold_one_part_of_a_sharded_array_are_compared():
    mesh = jax.make_mesh((2, 2), ("data", "seq"), devices=jax.devices()[:4])
    sharding = NamedSharding(mesh, PartitionSpec("seq"))

    def make(*values):
        shards = [jax.device_put(np.full((2, 3), x), device) for x, device in zip(values, mesh.devices.flat, strict=True)]
        return jax.make_array_from_single_device_arrays((4, 3), sharding, shards)

    check_ranks(make(1, 2, 1, 2))
    part = r"what \(Array int32 \[4, 3\], part \[2:4, 0:3\]\)"
    with pytest.raises(ValueError, match=rf"{part} is #\w+ on device 1, #\w+ on device 3"):
        check_ranks(make(1, 2, 1, 3))


def test_a_message_names_eight_entries_and_counts_the_rest():
    with pytest.raises(ValueError, match=r"^11 of 11 entries .*; and 3 more\. Put") as raised:
        check_ranks([copies([1, 2, 1, n]) for n in range(11)])
    assert str(raised.value).count(" on device ") + str(raised.value).count(" on devices ") >= 16


NOT_COMPARED: dict[str, Any] = {
    "a function": (lambda: {"a": {"f": len}}, "a.f must be a pytree of jax arrays or a number, .*, got builtin"),
    "by itself": (object, "what must be a pytree of jax arrays or a number, .*, got object"),
    "objects of numpy": (lambda: {"x": np.array([None])}, r"x must be .*, got ndarray of shape \[1\]"),
    "shapes only": (lambda: {"x": jax.ShapeDtypeStruct((2,), jnp.float32)}, r"x must be .*, got ShapeDtypeStruct of shape \[2\]"),
    "two of one name": (lambda: {"a.b": 1, "a": {"b": 2}}, "two entries are called 'a.b'"),
}


@pytest.mark.parametrize("case", NOT_COMPARED)
def test_incomparable_values_are_refused(case):
    make, message = NOT_COMPARED[case]
    with pytest.raises(ValueError, match=f"^{message}"):
        check_ranks(make())


def test_inside_jit_and_shard_map_it_is_refused():
    def program(x):
        check_ranks({"w": x})
        return x

    for inside in (program, jax.shard_map(program, mesh=mesh_of(2), in_specs=REPLICATED, out_specs=REPLICATED)):
        with pytest.raises(ValueError, match=r"^w is traced and has no value yet: call check_ranks outside of jit"):
            jax.jit(inside)(jnp.ones(2))


def test_a_donated_array_is_refused():
    x = jnp.ones(2)
    x.delete()
    with pytest.raises(ValueError, match=r"^w was deleted, as a donated array is"):
        check_ranks({"w": x})


def test_arrays_without_copies_are_not_read():
    alone = {"sharded": copies([np.full(2, n) for n in range(4)], PartitionSpec("seq")), "here": jnp.ones(2), "seed": 3}
    with patch.object(np, "asarray", side_effect=AssertionError("read")):
        check_ranks(alone)


PROCESS = """
import sys
import jax
import jax.numpy as jnp
import numpy as np

address, process = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(address, 2, process)
from jax.sharding import NamedSharding, PartitionSpec
from ring_attn_jax import causal, check_ranks, full, load_weights

mesh = jax.make_mesh((2, 2), ("data", "seq"))  # data: the processes
assert all(d.process_index == i for i, row in enumerate(mesh.devices) for d in row)


def over_all(values, spec=PartitionSpec(), shape=(2,)):
    mine = [jax.device_put(jnp.full(2, x), d) for x, d in zip(values, mesh.devices.flat, strict=True) if d in jax.local_devices()]
    return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, spec), mine)


right = lambda: {
    "replicated": over_all([1, 1, 1, 1]),
    "sharded": over_all([1, 2, 3, 4], PartitionSpec(("data", "seq")), (8,)),
    "here": jnp.ones(3),
    "seed": 7,
    "mask": causal(),
}
in_halves = lambda *values: {"halves": over_all(values, PartitionSpec("seq"), (4,))}
check_ranks(right())
check_ranks(right() | in_halves(1, 2, 1, 2))
for wrong in (
    in_halves(1, 2, 1, 3),
    {"replicated": over_all([1, 5, 1, 5])},
    {"replicated": over_all([1, 1, 1, 5])},
    {"here": jnp.ones(3) * (1 + process)},
    {"seed": 7 + process},
    {"seed": None if process else 7},
    {"mask": full() if process else causal()},
    {"more": 1} if process else {},
    {"f": len} if process else {},
):
    try:
        check_ranks(right() | wrong)
        said = "equal"
    except ValueError as error:
        said = str(error)
    with open(f"said-{process}", "a") as file:  # stdout is gloo's too
        print(said, file=file)
for folders in (("whole", "broken"), ("none", "broken")):
    try:
        load_weights(folders[process], mesh=mesh)
        said = "loaded"
    except ValueError as error:
        said = str(error)
    with open(f"said-{process}", "a") as file:
        print(said, file=file)
load_weights("whole", mesh=mesh)
"""
SAID = (
    r"1 of 6 .*: halves \(Array int32 \[4\], part \[2:4\]\) is #\w+ on device \d+, #\w+ on device \d+\. ",
    r"1 of 5 .*: replicated \(Array int32 \[2\]\) is #\w+ on devices \d+, \d+, #\w+ on devices \d+, \d+\. ",
    r"1 of 5 .*: replicated \(Array int32 \[2\]\) is #\w+ on devices \d+, \d+, \d+, #\w+ on device \d+\. Put",
    r"1 of 5 .*: here \(Array float32 \[3\]\) is #\w+ on device \d+, #\w+ on device \d+\. ",
    r"1 of 5 .*: seed \(int\) is 7 on process 0, 8 on process 1\. ",
    r"1 of 5 .*: seed is int on process 0, NoneType on process 1\. ",
    r"1 of 5 .*: mask \(Band\) is Band\(lo=0, hi=None\) on process 0, Band\(lo=None, hi=None\) on process 1\. ",
    r"1 of 6 .*: more is int on process 1, absent on process 0\. ",
    r"process 1: f must be a pytree of jax arrays",
    r"process 1: .*broken has neither model.safetensors nor",
    r"process 0: .*none is not a folder",
)


@pytest.mark.exhaustive
def test_processes_are_compared_and_all_raise_the_same(tmp_path):
    """Two processes of two devices each, which load weights together too."""
    pytest.importorskip("safetensors")
    save_weights(RingTransformer(vocab=31, dim=8, depth=1, heads=2, rngs=nnx.Rngs(0)), tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "broken", ignore=lambda *_: {"model.safetensors"})
    said = said_by_two(PROCESS, tmp_path)
    assert said[0] == said[1]
    assert len(said[0]) == len(SAID)
    for line, expected in zip(said[0], SAID, strict=True):
        assert re.match(expected, line), line
