"""The kernels of decoding without a GPU: in Triton's interpreter, against float64, with splits and tiles of a few slots."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from ring_attn_core.kernels import decode_call as of_core
from ring_attn_core.kernels.portable import launches
from ring_attn_core.kernels.tile_sizes import TileConfig
from ring_attn_torch import tree_attention_decode
from ring_attn_torch.attend import slots as attend
from ring_attn_torch.inference import tree_attention as inference

from ..support.decode import FEATURES, Problem, Shape, check
from ..support.selection import first
from .decode import Pair, on_rank
from .test_kernels import as_on_a_gpu

pytest.importorskip("triton")


@contextmanager
def interpreted(capability: int) -> Iterator[None]:
    """In a process of the pool: 16 slots a tile, two tiles a split at least, three multiprocessors."""
    launched = []
    launch, gpu = attend.launch, lambda device: capability
    inference._problem.cache_clear()
    launches.decode.cache_clear()
    with (
        as_on_a_gpu(),
        patch.object(inference, "capability", gpu),
        patch.object(of_core, "decode_tiles", lambda rows, *_: TileConfig(16 if rows < 17 else 32, 16, 1, 1)),
        patch.object(of_core, "MIN_SLOTS", 32),
        patch.object(launches, "SCAN", 32),
        patch.object(launches, "MERGED_AT_ONCE", 4),
        patch.object(attend, "launch", lambda what, arrays: launched.append(what) or launch(what, arrays)),
    ):
        yield
    assert {each.kernel for each in launched} == {"decode", "merge_pairs"}


def in_interpreter(group: Any, problems: list[Problem], capability: int) -> list[Pair]:
    with interpreted(capability):
        return on_rank(group, problems)


def beside_one_great_key(group: Any, slots: int, fp8: bool) -> float:
    """The weight of all keys but one, each of which has exp(-18) of the one's: less than half of float16's least number."""
    q, k, v = torch.zeros(1, 1, 1, 16), torch.zeros(1, slots, 1, 16), torch.ones(1, slots, 1, 16)
    q[..., 0], k[:, 0, :, 0], v[:, 0] = 18, 1, 0
    q, k, v = (x.half() for x in (q, k, v))
    if fp8:
        k, v = (x.to(torch.float8_e4m3fn) for x in (k, v))
    positions = torch.arange(slots, dtype=torch.int32)[None]
    with interpreted(90):
        given = {"q_positions": positions[:, -1:], "k_positions": positions}
        return tree_attention_decode(q, k, v, **given, group=group, scale=1.0).float().mean().item()


PLAIN = Shape(slots=110, queries=2, dtype="float16", heads=2, kv_heads=1)
ALL = tuple(name for name in FEATURES if name != "fp8")
SHAPES = [
    PLAIN,
    replace(PLAIN, dtype="float32", batch=2, slots=77, heads=4, kv_heads=2),
    replace(PLAIN, ranks=2, queries=5, heads=8, slots=61, features=ALL, dtype="float32"),
    replace(PLAIN, ranks=2, queries=3, features=(*ALL, "fp8"), v_dim=40, slots=70),
    replace(PLAIN, queries=3, features=("fp8", "sinks"), dtype="bfloat16"),
    replace(PLAIN, queries=5, slots=233, features=("window",)),
    replace(PLAIN, slots=0, ranks=2, features=("sinks",)),
    replace(PLAIN, slots=1, queries=1, batch=12, head_dim=70, v_dim=9),
]


@pytest.mark.parametrize("shape", first(SHAPES, 2), ids=str)
def test_the_kernels_are_exact(interpreter, shape):
    problems = [Problem(shape, seed) for seed in range(3)]
    pairs, *others = interpreter(shape.ranks, in_interpreter, problems, 90)
    check(problems, pairs)
    for other in others:
        assert all(np.array_equal(x, y) for a, b in zip(pairs, other, strict=True) for x, y in zip(a, b, strict=True))


def test_keys_of_one_byte_are_read_by_bits_where_the_gpu_cannot(interpreter):
    problem = Problem(replace(PLAIN, features=("fp8",)))
    (by_bits,), (converted,) = (interpreter(1, in_interpreter, [problem], capability)[0] for capability in (80, 90))
    assert np.array_equal(by_bits[0], converted[0])
    problem.check(*by_bits)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fp8", [False, True])
def test_many_small_probabilities_count_in_float16_too(interpreter, fp8):
    slots = 4096
    others = (slots - 1) * math.exp(-18)
    weight = interpreter(1, beside_one_great_key, slots, fp8)[0]
    assert abs(weight * (1 + others) / others - 1) < 2**-9


def test_unseen_slots_do_not_change_the_output(interpreter):
    problem = Problem(replace(PLAIN, queries=5, slots=61, features=ALL))
    mine, other = interpreter(1, in_interpreter, [problem, problem.with_other_unseen()], 90)[0]
    assert all(np.array_equal(x, y) for x, y in zip(mine, other, strict=True))
