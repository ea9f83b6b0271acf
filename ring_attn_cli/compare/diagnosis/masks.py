"""Mistakes of who sees whom: another mask, positions of another layout, masks that are forgotten, padding that counts as keys."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ring_attn_core.masks import causal, full
from ring_attn_core.reference.oracle import visible
from ring_attn_core.runs import Band

from .evidence import Evidence


def wrong_mask(evidence: Evidence) -> str | None:
    """Queries see other keys than they should."""
    if "out" not in evidence.missed:
        return None
    dense, rows = evidence.last_rows
    right = dense.forward(evidence.case.factor)
    before = evidence.distance(right.out, rows)
    for words, seen in _others(evidence, rows):
        if evidence.explained("out", before, evidence.distance(dense.forward(evidence.case.factor, seen).out, rows)):
            return f"the mask is wrong: {words}"
    padding = evidence.plan.ranks * evidence.plan.seq_local - evidence.case.length
    if padding and not evidence.case.alibi:
        share = 1 / (1 + padding * np.exp(-right.lse))  # keys of zeros have scores of 0
        if evidence.explained("out", before, evidence.distance(right.out * share[..., None], rows)):
            return f"padding is attended to: hide the keys whose positions are not below length, {padding} here"
    return None


def _others(evidence: Evidence, rows: range) -> Iterator[tuple[str, np.ndarray]]:
    """What else a query may have been let see, in words and as bool [s t]."""
    case, band, keys = evidence.case, evidence.case.band, range(evidence.case.length)
    given = [evidence.given.arrays[name][:1] if name in evidence.given.arrays else None for name in ("extents", "key_mask")]
    said = f", where {case.mask} was said"
    if evidence.plan.ranks > 1 and case.layout != "contiguous":
        held = np.concatenate([np.array(list(evidence.plan.positions(rank))) for rank in range(evidence.plan.ranks)])
        place = np.argsort(held)[: case.length]  # where the token of a position stands in the shards
        lag = place[rows.start : rows.stop, None] - place
        seen = (lag >= (-np.inf if band.lo is None else band.lo)) & (lag <= (np.inf if band.hi is None else band.hi))
        words = f"shards are taken for contiguous ones and are {case.layout}: positions(layout, ranks, length, rank) says where"
        yield f"{words} their tokens stand", seen & visible(full(), rows, keys, *given)[0]
    flip = lambda side: None if side is None else -side
    bands = {f"there is none{said}": full(), f"out is that of causal{said}": causal()}
    bands |= {f"q_pos - k_pos has the other sign{said}": Band(flip(band.hi), flip(band.lo))}
    for step, amount in ((-1, "one key more"), (1, "one key less")):
        if band.lo is not None:
            bands[f"each query sees {amount} after it{said}"] = Band(band.lo + step, band.hi)
        if band.hi is not None:
            bands[f"each query sees {amount} before it{said}"] = Band(band.lo, band.hi - step)
    for words, other in bands.items():
        if other != band:
            yield words, visible(other, rows, keys, *given)[0]
    for number, name in enumerate(("extents", "key_mask")):
        if given[number] is not None:
            kept = [None if at == number else x for at, x in enumerate(given)]
            yield f"{name} is not looked at", visible(band, rows, keys, *kept)[0]
