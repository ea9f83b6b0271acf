"""Some steps of benchmarks/steps: however a training is spread over four ranks, they are those of one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import pytest

from benchmarks.steps import jax_side, torch_side
from benchmarks.steps.recipe import CLIP, Recipe, apart

from .support.selection import first
from .support.spawn import MOST
from .torch.models import rank_in

CLOSE = 1e-9
FEW = Recipe(dtype="float64", optimizer="sgd", steps=5)
"""SGD: AdamW would hide a gradient that is too large by a factor, though its norm does not."""


@cache
def one_process() -> torch_side.Losses:
    found = torch_side.train(FEW, torch_side.made(FEW))
    assert min(found["norms"]) < CLIP < max(found["norms"])  # some steps are clipped
    return found


def check(found: torch_side.Losses) -> None:
    for kind, theirs in one_process().items():
        assert apart(found[kind], theirs) < CLOSE, kind


@cache
def mesh_in_pool(way: str) -> Any:
    return torch_side.mesh_of(torch_side.WAYS[way])


def on_rank(group: Any, way: str) -> torch_side.Losses | None:
    """Return the losses of one of the first four ranks; the others only help to make the mesh."""
    mesh = mesh_in_pool(way)
    if rank_in(group) >= torch_side.RANKS:
        return None
    return torch_side.train(FEW, torch_side.made(FEW, mesh), torch_side.WAYS[way], mesh)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("way", first(sorted(torch_side.WAYS, key=lambda way: "FSDP2" not in way and "TP" not in way), 2, 2))
def test_steps_of_four_ranks_of_torch_are_those_of_one_process(gloo, way):
    for found in gloo(MOST, on_rank, way)[: torch_side.RANKS]:
        check(found)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("way", first(reversed(jax_side.WAYS), 1, 1))
def test_steps_of_four_devices_of_jax_are_those_of_one_process_of_torch(way):
    with jax.enable_x64(True):
        mesh = jax_side.mesh_of(way)
        check(jax_side.train(FEW, jax_side.made(FEW, mesh), mesh))
