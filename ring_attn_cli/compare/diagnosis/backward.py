"""Mistakes of the whole backward: a missing or wrong delta = rowsum(dout * out) - dlse, or another softmax."""

from __future__ import annotations

from .dense import Backward, Dense
from .evidence import Evidence
from .gradients import LONGEST

NO_DELTA = (
    "the backward lacks delta = rowsum(dout * out){}: dq and dk are those of ds = p * {}, and ds = p * (dp - delta) is right"
)
MISTAKES = {
    Backward(delta=0.0): NO_DELTA.format("", "(dp + dlse)"),
    Backward(delta=0.0, dlse=0.0): NO_DELTA.format(" - dlse", "dp"),
    Backward(dlse=-1.0): "the gradient of lse has the wrong sign: delta is rowsum(dout * out) - dlse, and + dlse was computed",
}
OF_SHARDS = (
    "the backward takes each shard's own out and lse: its probabilities are exp(score - lse), with lse and delta of all keys, in "
    "the backward of every shard"
)


def wrong_backward(evidence: Evidence) -> tuple[str, frozenset[str]] | None:
    """Return the description of a mistake that explains dq and dk, and the names of the gradients it explains, or None."""
    names = [name for name in ("dq", "dk", "dv") if name in evidence.missed]
    if "out" in evidence.missed or not {*names} & {"dq", "dk"} or evidence.plan.length > LONGEST:
        return None
    case, ranks = evidence.case, evidence.plan.ranks
    mistakes = {backward: words for backward, words in MISTAKES.items() if "lse" in evidence.cotangents or backward.dlse == 1}
    if ranks > 1:
        mistakes |= {Backward(dlse=counts, of_shards=True): OF_SHARDS for counts in (0.0, 1.0)}
    dense = Dense(case, evidence.given.arrays, range(case.length), case.heads // case.kv_heads)
    dlse = evidence.given.cotangents["lse"][0] * ("lse" in evidence.cotangents)
    for backward, words in mistakes.items():
        parts = dense.parts(evidence.given.cotangents["out"][0], dlse, evidence.rank_of, ranks, backward)
        wrong = {name: x.sum(0)[None] if name == "dq" else x.sum(0)[None, :, None] for name, x in parts.items()}
        explained = [n for n in names if evidence.explained(n, evidence.error(n), evidence.error_of_heads(n, wrong[n]))]
        if {"dq", "dk"} & {*names} <= {*explained}:
            return words, frozenset(explained)
    return None
