"""Mistakes of the backward: gradients that are lost, scaled, permuted, or lack the parts of some ranks."""

from __future__ import annotations

import numpy as np

from ring_attn_core.reference.tolerance import relative_error

from ..measure import first
from .dense import Dense
from .evidence import Evidence

LONGEST = 2048
"""Most tokens for which the parts of gradients are computed; their matrices grow with the square of the tokens."""


def lse_without_gradient(evidence: Evidence) -> str | None:
    """Test whether the gradient of lse is lost, so that dq and dk are those of out alone."""
    names = [name for name in ("dq", "dk") if name in evidence.missed]
    if not names or "lse" not in evidence.cotangents:
        return None
    right = evidence.exact(evidence.of_heads, lse_counts=0.0)
    if all(evidence.explained(n, evidence.error(n), evidence.error_of_heads(n, right[n])) for n in names):
        return f"lse has lost its gradient: {' and '.join(names)} are those of out alone"
    return None


def lost_gradient(evidence: Evidence, name: str, attention: bool) -> str | None:
    """Test whether a gradient is zero, a multiple of the right one, misplaced, or lacks the parts of some ranks."""
    right = evidence.truth.exact[name].astype(np.float64)
    got = first(evidence.got[name], right).astype(np.float64)
    if not got.any():
        return f"{name} is zero everywhere: the gradient is lost (a detach, a stop_gradient, or a backward that returns none)"
    factor = float((got * right).sum() / (right * right).sum())
    if evidence.explained(name, evidence.error(name), relative_error(got - factor * right + right, right)):
        return f"{name} is {factor:.4g} times what it should be{_reason(evidence, name, factor, attention)}"
    if name in ("dq", "dk", "dv"):
        for each in (_on_other_ranks, _multiple_on_some_ranks):
            if words := each(evidence, name, got, right):
                return words
    if words := _in_another_order(evidence, name, got, right):
        return words
    known_parts = attention and name in ("dq", "dk", "dv") and evidence.plan.ranks > 1
    return _lost_part(evidence, name) if known_parts and evidence.plan.length <= LONGEST else None


def _reason(evidence: Evidence, name: str, factor: float, attention: bool) -> str:
    """Return the end of the sentence about a gradient that is ``factor`` times the right one; "" if no reason is known.

    It says ", on one device too" if the result of one device is wrong by the same factor. After a colon it names the mistakes
    that give this factor, such as a mean over the ranks in place of a sum, or a scale that is missing or applied twice.
    """
    ranks, known, where = evidence.plan.ranks, [], ""
    if evidence.alone is not None and name in evidence.alone:
        right = evidence.truth.exact[name].astype(np.float64)
        mine = first(evidence.alone[name], right).astype(np.float64)
        if relative_error(mine, factor * right) < 1e-2:
            where = ", on one device too"
    if ranks > 1 and not where:
        known += [(1 / ranks, "averaged over the ranks where it should be summed"), (ranks, "summed once more over the ranks")]
    if attention and name in ("dq", "dk"):
        known += [(1 / evidence.case.factor, "the scale is missing in it"), (evidence.case.factor, "scaled twice")]
    hints = [words for value, words in known if abs(factor / value - 1) < 1e-2]
    return where + (f": {', or '.join(hints)}" if hints else "")


def _multiple_on_some_ranks(evidence: Evidence, name: str, got: np.ndarray, right: np.ndarray) -> str | None:
    """Test whether some ranks have a multiple of the right gradient."""
    of, ranks = evidence.rank_of, evidence.plan.ranks
    if ranks == 1:
        return None
    factors, corrected = [], got.copy()
    for at in (of == rank for rank in range(ranks)):
        norm = (right[:, at] ** 2).sum()
        factors.append(float((got[:, at] * right[:, at]).sum() / norm) if norm else 1.0)
        corrected[:, at] += (1 - factors[-1]) * right[:, at]
    if not evidence.explained(name, evidence.error(name), relative_error(corrected, right)):
        return None
    off = [(rank, factor) for rank, factor in enumerate(factors) if abs(factor - 1) > 1e-2]
    words = ", ".join(f"{factor:.4g} times what it should be on rank {rank}" for rank, factor in off)
    return f"{name} is wrong on {'one rank' if len(off) == 1 else 'some ranks'}: {words}" if off else None


def _on_other_ranks(evidence: Evidence, name: str, got: np.ndarray, right: np.ndarray) -> str | None:
    """Test whether ranks hold the gradients of other ranks' tokens, which then stopped a hop too early or too late."""
    ranks, of = range(evidence.plan.ranks), evidence.rank_of
    if len({int((of == rank).sum()) for rank in ranks}) > 1:
        return None  # shards of different lengths, without padding, cannot be exchanged
    errors = np.array([[relative_error(got[:, of == rank], right[:, of == other]) for other in ranks] for rank in ranks])
    holds = errors.argmin(1)
    if (holds == np.arange(len(holds))).all() or not evidence.explained(name, evidence.error(name), errors.min(1).max()):
        return None
    words = ", ".join(f"rank {rank} that of rank {other}" for rank, other in enumerate(holds) if rank != other)
    return f"{name} comes home to the wrong ranks: {words}"


def _in_another_order(evidence: Evidence, name: str, got: np.ndarray, right: np.ndarray) -> str | None:
    """Test whether each rank has the right numbers in the wrong order.

    The sorted numbers are compared, within 1e-4 because large samples of one distribution are alike once sorted. Errors below 0.1
    are excluded: slightly noisy numbers also sort alike, but another order gives an error of about 1.
    """
    if evidence.error(name) < 0.1:
        return None
    of = evidence.rank_of if name in ("dq", "dk", "dv") else None
    shards = [(got, right)] if of is None else [(got[:, of == rank], right[:, of == rank]) for rank in range(evidence.plan.ranks)]
    mine, expected = (np.concatenate([np.sort(each, None) for each in side]) for side in zip(*shards, strict=True))
    if relative_error(mine, expected) > min(4 * evidence.truth.bounds[name], 1e-4):
        return None
    return (
        f"{name} holds the right numbers in another order: dimensions are exchanged, or memory that is not contiguous is read as "
        "if it were (torch.distributed.nn.functional.all_gather does so with gradients under gloo, ring_attn_torch.gather not)"
    )


def _lost_part(evidence: Evidence, name: str) -> str | None:
    """Fit the gradient of each rank's tokens as a linear combination of all ranks' parts; a part with coefficient 0 is lost."""
    case, ranks = evidence.case, evidence.rank_of
    dense = Dense(case, evidence.given.arrays, range(case.length), case.heads // case.kv_heads)
    dlse = evidence.given.cotangents["lse"][0] * ("lse" in evidence.cotangents)
    parts = dense.parts(evidence.given.cotangents["out"][0], dlse, ranks, evidence.plan.ranks)[name]
    got = evidence.got[name][0, :, : dense.heads] if name == "dq" else evidence.got[name][0, :, 0]
    counts = np.full((evidence.plan.ranks, evidence.plan.ranks), np.nan)
    fitted = np.zeros_like(got, np.float64)
    for rank in range(evidence.plan.ranks):
        at = ranks == rank
        columns = parts[:, at].reshape(evidence.plan.ranks, -1)
        alive = [giver for giver in range(evidence.plan.ranks) if columns[giver].any()]
        solved = np.linalg.lstsq(columns[alive].T, got[at].ravel(), rcond=None)[0]
        counts[rank, alive] = solved
        fitted[at] = (solved @ columns[alive]).reshape(fitted[at].shape)
    right = parts.sum(0)
    if not evidence.explained(name, relative_error(got, right), relative_error(got - fitted + right, right)):
        return None
    givers = "keys" if name == "dq" else "queries"
    off = [(rank, giver) for rank, giver in np.argwhere(np.abs(counts - 1) > 0.02)]
    lost = all(abs(counts[pair]) < 0.02 for pair in off)
    others = [tuple(pair) for pair in np.argwhere(np.isfinite(counts)) if pair[0] != pair[1]]
    if lost and {(int(a), int(b)) for a, b in off} == {(int(a), int(b)) for a, b in others}:
        return f"{name} is one rank's part only: every rank has what its own {givers} give, and those of the other ranks are lost"
    words = [f"rank {giver}'s {givers} count {counts[rank, giver]:.3g} times for rank {rank}'s tokens" for rank, giver in off]
    return f"{name} is put together wrongly: {'; '.join(words[:4])}{' and so on' if len(words) > 4 else ''}" if words else None
