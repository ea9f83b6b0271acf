"""A few cases that contain every pair of values of two fields, since nearly all failures need at most two features."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import combinations, product
from random import Random
from typing import Any

import numpy as np

from ring_attn_core import LAYOUTS, causal, full, sliding_window
from ring_attn_core.reference.oracle import Attention

from .cases import DTYPES, HEADS, LENGTHS, MASKS, RANKS, Case, check_same

Choice = tuple[str, str]
"""The name of an axis, and of one of its values."""

AXES: dict[str, dict[str, dict[str, Any]]] = {
    "layout": {name: {"layout": name} for name in LAYOUTS},
    "mask": {
        name: {"mask": mask} for name, mask in {**MASKS, "lopsided": sliding_window(7, 3), "offset": causal(offset=-4)}.items()
    },
    "ranks": {str(ranks): {"ranks": ranks} for ranks in RANKS},
    "heads": {name: {"heads": heads, "kv_heads": kv_heads} for name, (heads, kv_heads) in HEADS.items()},
    "length": {name: {"length": length} for name, length in LENGTHS.items()},
    "dtype": {name: {"dtype": name} for name in DTYPES},
    "keys": {"as queries": {}, "longer": {"kv_length": 61}, "shorter": {"kv_length": 26}},
    "v_dim": {"equal": {}, "other": {"v_dim": 5}},
    "extents": {str(name): {"extents": name} for name in (None, "documents", "prefix", "padding", "any")},
    "key_mask": {str(name): {"key_mask": name} for name in (None, "random", "shard", "none")},
    "key_extents": {str(name): {"key_extents": name} for name in (None, "tree", "any")},
    "softcap": {"no": {}, "yes": {"softcap": 2.0}},
    "sinks": {"no": {}, "yes": {"sinks": True}},
    "alibi": {"no": {}, "yes": {"alibi": True}},
    "dropout": {"no": {}, "yes": {"dropout_rate": 0.3}},
}
"""The values of a case's fields, by axis and name; see Case."""


def covering(axes: Mapping[str, Mapping[str, Any]], tries: int = 30) -> Iterator[dict[str, str]]:
    """Yield one choice on every axis until all pairs of choices on two axes have occurred: greedy and deterministic."""
    rng = Random(0)
    missing = {pair for a, b in combinations(sorted(axes), 2) for pair in product(_choices(axes, a), _choices(axes, b))}
    while missing:
        ordered, partners = sorted(missing), defaultdict[Choice, set[Choice]](set)
        for one, other in ordered:
            partners[one].add(other)
            partners[other].add(one)
        rows = [_row(axes, ordered, partners, rng) for _ in range(tries)]
        best = max(rows, key=lambda row: len(missing & _pairs(row)))
        missing -= _pairs(best)
        yield best


def _row(
    axes: Mapping[str, Mapping[str, Any]],
    missing: list[tuple[Choice, Choice]],
    partners: Mapping[Choice, set[Choice]],
    rng: Random,
) -> dict[str, str]:
    """Return a row that begins with a missing pair and adds the choices that complete the most pairs.

    ``partners``: the choices that miss a choice.
    """
    row = dict(rng.choice(missing))
    for axis in rng.sample(sorted(axes.keys() - row), len(axes) - 2):
        gained = {value: len(partners[axis, value] & row.items()) for value in axes[axis]}
        most = max(gained.values())
        row[axis] = rng.choice([value for value in axes[axis] if gained[value] == most])
    return row


def _choices(axes: Mapping[str, Mapping[str, Any]], axis: str) -> list[Choice]:
    return [(axis, value) for value in axes[axis]]


def _pairs(row: dict[str, str]) -> set[tuple[Choice, Choice]]:
    return set(combinations(sorted(row.items()), 2))


COMBINATIONS = [Case(**{name: value for axis in AXES for name, value in AXES[axis][row[axis]].items()}) for row in covering(AXES)]
WITH_BLANKS = [case for case in COMBINATIONS if not (case.visible.any(1).all() and case.visible.any(2).all())]
"""The cases with a fully masked query or an unused key."""

SINKS_ALONE = Case(mask=full(), ranks=2, heads=2, kv_heads=2, extents="any", sinks=True)
"""A case with queries that see no key, but have a sink."""


def with_nan_in_dlse(case: Case) -> Case:
    """Return the same case with NaN in the dlse of each fully masked query."""
    seeing = np.any(case.visible, 2)[..., None]
    return case.given(dlse=np.where(seeing, case.arrays["dlse"], np.float32(np.nan)))


def check_sinks_alone(clean: Attention, other: Attention) -> None:
    """Assert that NaN in the dlse of fully masked queries reached the sinks' gradient, and changed no bit of anything else."""
    check_same(other._replace(dsinks=None), clean._replace(dsinks=None))
    assert other.dsinks is not None
    assert np.isnan(other.dsinks).all()


TREES = [
    Case(key_extents="tree", ranks=1, length=61),
    Case("contiguous", key_extents="tree", length=61),
    Case("striped", key_extents="tree", ranks=3, dtype="float16"),
    Case("zigzag", key_extents="tree", ranks=8, length=48, sinks=True, softcap=2.0),
    Case("zigzag", full(), key_extents="any", ranks=2, kv_length=61, v_dim=5, dropout_rate=0.3),
    Case("striped", full(), key_extents="any", extents="any", key_mask="random", alibi=True, length=61),
]
"""Key extents of prefix trees, with key tiles that are skipped, partly visible and fully visible; and of any intervals."""

FEATURES: dict[str, Any] = {"extents": "documents", "key_mask": "random", "softcap": 2.0, "sinks": True, "alibi": True}
EVERYTHING = [Case(layout, sliding_window(30, 9), length=57, dropout_rate=0.3, **FEATURES) for layout in LAYOUTS]
"""Every feature in one call, and a window with two ends, which also cuts documents on both sides."""
