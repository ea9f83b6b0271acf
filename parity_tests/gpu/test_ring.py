"""The rings on real GPUs: NCCL in PyTorch, XLA's permutes in JAX; skipped with fewer than two."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from ring_attn_core.reference.oracle import Attention
from ring_attn_core.reference.tolerance import relative_error

from ..jax import ring as on_jax
from ..support.cases import SPECIAL, Case, check, grid, pairs
from ..support.combinations import COMBINATIONS
from ..support.spawn import Ranks
from ..torch import ring as on_torch
from .tolerance import bound_on_hopper

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs of one host, found {GPUS}")
FITTING = [case for case in grid() if case.ranks <= GPUS]
CASES = [*pairs(FITTING), *(case for case in (*SPECIAL, *COMBINATIONS) if case.ranks <= GPUS)] if GPUS > 1 else []
BOUND = bound_on_hopper if GPUS and torch.cuda.get_device_capability() == (9, 0) else None


@pytest.fixture(scope="module")
def nccl():
    pool = Ranks("nccl", GPUS)
    yield pool
    pool.close()


@pytest.mark.filterwarnings("ignore:hopper. in the")  # kernels that keep many registers in memory give way to portable ones
@pytest.mark.parametrize("case", CASES, ids=str)
def test_rings_are_exact_on_gpus_and_agree(nccl, case):
    case = replace(case, strategy="ring") if case.strategy == "auto" else case  # "auto" may take another one in each framework
    ours, theirs = on_torch.run(nccl, case), on_jax.run(case)
    check(case, ours, BOUND)
    check(case, theirs, BOUND)
    for name, mine, other in zip(Attention._fields, ours, theirs, strict=True):
        if case.dtype == "float64" or name == "dsinks":  # the frameworks' own sums
            assert mine is None or relative_error(mine, other) <= 1e-6, name
        else:
            assert np.array_equal(mine, other), name


def test_xla_overlaps_every_hop_of_the_forward_pass():
    """In the scheduled program no permute is synchronous, and a step's kernel runs between its start and its end."""
    case = Case(ranks=GPUS, length=64 * GPUS, batch=1)
    mesh = on_jax.mesh_of(GPUS)
    ring = jax.shard_map(
        partial(on_jax.ring_attention, **on_jax.options(case.plan)), mesh=mesh, in_specs=(on_jax.SEQ,) * 3, out_specs=on_jax.SEQ
    )
    sharding = jax.NamedSharding(mesh, on_jax.SEQ)
    shape = lambda heads: jax.ShapeDtypeStruct((1, 64 * GPUS, heads, 16), jnp.float32, sharding=sharding)
    text: Any = jax.jit(ring).lower(shape(4), shape(2), shape(2)).compile().as_text()
    starts = [line for line in text.splitlines() if re.search(r"= .*collective-permute-start\(", line)]
    assert len(starts) == GPUS - 1
    assert not [line for line in starts if '"is_sync":true' in line]
    entry = text[text.index("ENTRY") :]
    between = re.findall(r"collective-permute-start\(.*?collective-permute-done\(", entry, re.DOTALL)
    assert all(" while(" in span or "fusion" in span or "call(" in span for span in between)
