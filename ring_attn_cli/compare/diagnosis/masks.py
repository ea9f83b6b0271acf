"""Mistakes of the mask: another band, positions of another layout, ignored masks, and padding that is attended to."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ring_attn_core.masks import causal, full
from ring_attn_core.reference.oracle import visible
from ring_attn_core.reference.tolerance import relative_error
from ring_attn_core.runs import Band

from ..measure import first
from .evidence import ROWS, Evidence


def wrong_mask(evidence: Evidence) -> str | None:
    """Test whether queries see other keys than they should."""
    if "out" not in evidence.missed:
        return None
    dense, rows = evidence.last_rows
    right = dense.forward(evidence.case.factor)
    before = evidence.distance(right.out, rows)
    for words, visible_from in _others(evidence):
        seen = visible_from(rows)
        judged = seen.any(-1)  # the out of a fully masked query is arbitrary
        if 2 * judged.sum() < len(rows):
            continue
        wrong = evidence.distance(right.out, rows, judged)
        if evidence.explained("out", wrong, evidence.distance(dense.forward(evidence.case.factor, seen).out, rows, judged)):
            early = range(min(ROWS, evidence.case.length))
            filled = _attends_to_all(evidence, early, ~visible_from(early).any(-1))
            return f"the mask is wrong: {words}{'; and ' + FILLED if filled else ''}"
    padding = evidence.plan.ranks * evidence.plan.seq_local - evidence.case.length
    if padding and not evidence.case.alibi:
        share = 1 / (1 + padding * np.exp(-right.lse))  # keys of zeros have scores of 0
        if evidence.explained("out", before, evidence.distance(right.out * share[..., None], rows)):
            return f"padding is attended to: hide the keys whose positions are not below length, {padding} here"
    return None


FILLED = (
    "queries that see no key attend to all keys alike: their scores were filled with a finite number such as -1e30, and its "
    "softmax is uniform; out is 0 and lse -inf for such a query"
)


def finite_fill(evidence: Evidence) -> str | None:
    """Test whether masked scores were filled with a finite number in place of -inf.

    The softmax of a fully masked query is then uniform: its out is the mean of v, and the out of all other queries is right.
    """
    lse, out = evidence.truth.exact["lse"], evidence.truth.exact["out"]
    if "out" not in evidence.missed or np.isfinite(lse).all():
        return None
    got, sees = first(evidence.got["out"], out), np.isfinite(lse)
    rows = range(evidence.case.length)
    if relative_error(got[sees], out[sees]) > 4 * evidence.truth.bounds["out"]:
        return None
    return FILLED if _attends_to_all(evidence, rows, ~sees[0].any(-1)) else None


def _attends_to_all(evidence: Evidence, rows: range, blank: np.ndarray) -> bool:
    """Test whether out is the mean of all values, within 5%, over the queries that ``blank`` marks; False if it marks none.

    ``rows``: a range of queries of batch row 0. ``blank`` bool [s]: a flag for each of them.
    """
    if not blank.any():
        return False
    got = evidence.got["out"][0, rows.start : rows.stop][blank]
    group = evidence.case.heads // evidence.case.kv_heads
    mean = evidence.given.arrays["v"][0].astype(np.float64).mean(0).repeat(group, 0)
    return relative_error(got, np.broadcast_to(mean, got.shape)) < 0.05


def _others(evidence: Evidence) -> Iterator[tuple[str, Callable[[range], np.ndarray]]]:
    """Yield each plausible wrong mask: its description, and a function from a range of queries to the mask bool [s t]."""
    case, band, keys = evidence.case, evidence.case.band, range(evidence.case.length)
    given = [evidence.given.arrays[name][:1] if name in evidence.given.arrays else None for name in ("extents", "key_mask")]
    said = f", where {case.mask} was said"
    if evidence.plan.ranks > 1 and case.layout != "contiguous":
        held = np.concatenate([np.array(list(evidence.plan.positions(rank))) for rank in range(evidence.plan.ranks)])
        place = np.argsort(held)[: case.length]  # index of each position in the concatenated shards

        def of_places(rows: range) -> np.ndarray:
            lag = place[rows.start : rows.stop, None] - place
            seen = (lag >= (-np.inf if band.lo is None else band.lo)) & (lag <= (np.inf if band.hi is None else band.hi))
            return seen & visible(full(), rows, keys, *given)[0]

        words = f"shards are taken for contiguous ones and are {case.layout}: positions(layout, ranks, length, rank) says where"
        yield f"{words} their tokens stand", of_places
    flip = lambda side: None if side is None else -side
    bands = {f"there is none{said}": full(), f"out is that of causal{said}": causal()}
    bands |= {f"q_pos - k_pos has the other sign{said}": Band(flip(band.hi), flip(band.lo))}
    for step, amount in ((-1, "one key more"), (1, "one key less")):
        if band.lo is not None:
            after = "no query sees itself" if band.lo + step == 1 else f"each query sees {amount} after it"
            bands[f"{after}{said}"] = Band(band.lo + step, band.hi)
        if band.hi is not None:
            bands[f"each query sees {amount} before it{said}"] = Band(band.lo, band.hi - step)
    for words, other in bands.items():
        if other != band:
            yield words, lambda rows, other=other: visible(other, rows, keys, *given)[0]
    for number, name in enumerate(("extents", "key_mask")):
        if given[number] is not None:
            kept = [None if at == number else x for at, x in enumerate(given)]
            yield f"{name} is not looked at", lambda rows, kept=kept: visible(band, rows, keys, *kept)[0]
