"""Mistakes of the forward other than mask and scale: ignored features, and shards that are merged wrongly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .dense import Dense
from .evidence import Evidence


def forgotten_feature(evidence: Evidence) -> str | None:
    """Test whether softcap, sinks, alibi_slopes or dropout_rate is ignored, or the ALiBi slopes have the wrong sign."""
    if "out" not in evidence.missed:
        return None
    case, given = evidence.case, evidence.given.arrays
    dense, rows = evidence.last_rows
    before = evidence.distance(dense.forward(case.factor).out, rows)
    tried = {
        f"{name} is not looked at: out is that without it": (replace(case, **{name: none}), given)
        for name, none in (("softcap", None), ("dropout_rate", 0.0))
        if getattr(case, name)
    }
    for name in ("sinks", "alibi_slopes"):
        if name in given:
            others = {each: x for each, x in given.items() if each != name}
            tried[f"{name} is not looked at: out is that without it"] = case, others
    if "alibi_slopes" in given:
        words = "the alibi_slopes have the other sign: a score gets slope * (k_pos - q_pos), which is negative for earlier keys"
        tried[words] = case, given | {"alibi_slopes": -given["alibi_slopes"]}
    for words, (other, arrays) in tried.items():
        out = Dense(other, arrays, rows, case.heads).forward(case.factor).out
        if evidence.explained("out", before, evidence.distance(out, rows)):
            return words
    return None


def merged_alike(evidence: Evidence) -> str | None:
    """Test whether the outputs of the key shards are summed or averaged without regard to their lse."""
    if evidence.plan.ranks == 1 or "out" not in evidence.missed:
        return None
    dense, rows = evidence.last_rows
    factor, of = evidence.case.factor, evidence.rank_of
    before = evidence.distance(dense.forward(factor).out, rows)
    shards = [dense.forward(factor, dense.seen & (of == rank)).out for rank in range(evidence.plan.ranks)]
    for name, out in (("sum", np.sum(shards, 0)), ("mean", np.mean(shards, 0))):
        if evidence.explained("out", before, evidence.distance(out, rows)):
            return (
                f"shards are merged as if their softmaxes had the same denominator: out is the {name} of what each shard of keys "
                "gives alone, where that of a shard counts exp(lse of the shard - lse) times"
            )
    return None
