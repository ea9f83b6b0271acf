"""The results of mistakes in attention, computed without a ring, as evidence for the diagnosis of ``ring-attn compare``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ring_attn_cli.compare.cases import Arrays, Case
from ring_attn_cli.compare.diagnosis import Evidence
from ring_attn_cli.compare.measure import measure
from ring_attn_cli.compare.oracles import ORACLES, by_name
from ring_attn_core.reference.oracle import plain, rounding

Plant = Callable[[Case, Arrays, Arrays], Arrays]
"""A function ``plant(case, inputs, result)`` that returns the result with a mistake in it."""

RANKS = 3
CASES = {
    "plain": Case(length=61, head_dim=16),
    "everything": Case(
        length=61, head_dim=16, softcap=3.0, sinks=True, alibi=True, dropout_rate=0.2, key_mask=True, documents=3, mask="full"
    ),
}


def evidence(case: Case, plant: Plant, ranks: int = RANKS, on_one_device: Plant | None = None) -> Evidence:
    """Return the evidence of a plain computation in the dtype, changed by ``plant``.

    ``on_one_device``: makes the result of one device; None: the evidence has no such result.
    """
    oracle = ORACLES["attention"]
    inputs = oracle.inputs(case)
    truth = oracle.truth(case, inputs, inputs.cotangents)
    got = plant(case, inputs.arrays, dict(truth.plain))
    alone = None if on_one_device is None else on_one_device(case, inputs.arrays, dict(truth.plain))
    missed = [each.name for each in measure(got, truth.exact, truth.bounds, case.dtype) if not each.within]
    return Evidence(case, case.plan(ranks), inputs, truth, got, missed, frozenset(inputs.cotangents), alone)


def again(case: Case, dtype: str | None = None, **changed: Any) -> Arrays:
    """Return the results of the plain computation with other inputs, fields of the case, or dtype."""
    inputs = ORACLES["attention"].inputs(case)
    arrays = inputs.arrays | {"dout": inputs.cotangents["out"], "dlse": inputs.cotangents["lse"]}
    keep = rounding(dtype or case.dtype)
    arrays |= {name: keep(arrays[name]) for name in ("q", "k", "v", "dout")}
    arguments: dict[str, Any] = {**arrays, "mask": case.band, "dtype": dtype or case.dtype, **case.scalars, **changed}
    return by_name(plain(**arguments))


def rank_of(case: Case) -> np.ndarray:
    """Return the rank [s] that holds each token in a ring of RANKS."""
    ranks = np.zeros(case.length, int)
    for rank in range(RANKS):
        held = np.array(list(case.plan(RANKS).positions(rank)))
        ranks[held[held < case.length]] = rank
    return ranks
