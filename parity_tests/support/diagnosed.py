"""The results of mistakes in attention, computed without a ring, as evidence for the diagnosis of ``ring-attn compare``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ring_attn_cli.compare.cases import Arrays, Case
from ring_attn_cli.compare.diagnosis import Evidence
from ring_attn_cli.compare.measure import quantities
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
    missed = [each.name for each in quantities(got, truth.exact, truth.bounds, case.dtype) if not each.within]
    return Evidence(case, case.plan(ranks), inputs, truth, got, missed, frozenset(inputs.cotangents), alone)


def again(case: Case, dtype: str | None = None, **changed: Any) -> Arrays:
    """Return the results of the plain computation with other inputs, fields of the case, or dtype."""
    inputs = ORACLES["attention"].inputs(case)
    arrays = inputs.arrays | {"dout": inputs.cotangents["out"], "dlse": inputs.cotangents["lse"]}
    keep = rounding(dtype or case.dtype)
    arrays |= {name: keep(arrays[name]) for name in ("q", "k", "v", "dout")}
    arguments: dict[str, Any] = {**arrays, "mask": case.band, "dtype": dtype or case.dtype, **case.scalars, **changed}
    return by_name(plain(**arguments))


def written_out(
    case: Case,
    inputs: Arrays,
    seen: np.ndarray | None = None,
    *,
    fill: float = -np.inf,
    delta: float = 1.0,
    dlse: float = 1.0,
    of_shards: bool = False,
) -> Arrays:
    """Return causal attention and its gradients with every matrix materialized; batch row 0, no features.

    ``seen`` [s t]: None is causal. ``fill`` replaces masked scores. ``delta``, ``dlse``: factors of rowsum(dO * O) and of the
    cotangent of lse. ``of_shards``: the backward takes each shard's own (out, lse) of a ring of RANKS.
    """
    cotangents = ORACLES["attention"].inputs(case).cotangents
    place = np.arange(case.length)
    seen = place[:, None] >= place if seen is None else seen
    read = np.arange(case.heads) // (case.heads // case.kv_heads)
    heads_first = lambda x: x[0].astype(np.float64).swapaxes(0, 1)
    q, k, v = heads_first(inputs["q"]), heads_first(inputs["k"])[read], heads_first(inputs["v"])[read]
    dout, from_lse = heads_first(cotangents["out"]), cotangents["lse"][0].T * dlse
    scores = np.where(seen, case.factor * q @ k.swapaxes(1, 2), fill)
    out, lse, p = _softmax(scores, v)
    shards = [rank_of(case) == rank for rank in range(RANKS)] if of_shards else [np.ones(case.length, bool)]
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for keys in shards:
        its_out, _, p = _softmax(np.where(keys, scores, -np.inf), v)
        row = (dout * its_out).sum(-1) * delta - from_lse
        ds = np.where(seen & keys, p * (dout @ v.swapaxes(1, 2) - row[..., None]), 0) * case.factor
        dq, dk, dv = dq + ds @ k, dk + ds.swapaxes(1, 2) @ q, dv + p.swapaxes(1, 2) @ dout
    summed = lambda x: x.reshape(case.kv_heads, -1, *x.shape[1:]).sum(1)
    back = lambda x: x.swapaxes(0, 1)[None].astype(np.float32)
    return {"out": back(out), "lse": back(lse), "dq": back(dq), "dk": back(summed(dk)), "dv": back(summed(dv))}


def rank_of(case: Case) -> np.ndarray:
    """Return the rank [s] that holds each token in a ring of RANKS."""
    ranks = np.zeros(case.length, int)
    for rank in range(RANKS):
        held = np.array(list(case.plan(RANKS).positions(rank)))
        ranks[held[held < case.length]] = rank
    return ranks


def _softmax(scores: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return out, lse and the probabilities; a row without a finite score has 0, -inf and 0."""
    top = np.maximum(scores.max(-1, keepdims=True), np.finfo(np.float64).min)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    p = weights / np.where(total > 0, total, 1)
    with np.errstate(divide="ignore"):
        return p @ v, (np.log(total) + top)[..., 0], p
