"""Random configurations of dilated attention on a ring of 4: none hangs, all are right.

A rank that does not come within the deadline is named by the error, and the pool starts anew.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from ..support import spawn
from ..support.dilated import Case, check, drawn
from ..support.selection import first
from ..support.spawn import PerRank
from .dilated import on_rank
from .framework import Torch

DEADLINE = 30
"""Seconds for one configuration. Longer than gloo's own, after which the ranks that wait for another say so."""


@pytest.mark.parametrize("seeds", first([range(15), range(15, 1000)], 0, 1, "campaign"), ids=["15", "1000"])
def test_random_configurations_run_without_a_hang_and_are_exact(gloo, monkeypatch, seeds):
    monkeypatch.setattr(spawn, "PATIENCE", DEADLINE)
    for seed in seeds:
        case = drawn(np.random.default_rng(seed), 4)
        try:
            check(case, Torch(lambda: gloo).dilated(case))
        except Exception as error:
            error.add_note(f"seed {seed}: {case}")
            gloo.close()
            raise


def late(group: Any, rank: int, *arguments: Any) -> Any:
    if rank == 2:
        time.sleep(2 * DEADLINE)
    return on_rank(group, *arguments)


@pytest.mark.full
def test_a_rank_that_does_not_come_is_named(gloo, monkeypatch):
    monkeypatch.setattr(spawn, "PATIENCE", DEADLINE)
    case = Case((32,), (1,))
    with pytest.raises(TimeoutError, match="rank 2 died or gave no answer within 30 s"):
        gloo(case.ranks, late, PerRank(0, 1, 2, 3), case.dtype, case.arguments, PerRank(*case.shards()))
