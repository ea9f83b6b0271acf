"""The record of a call of generate: the same for what means the same, whichever numbers it was told in."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from ring_attn_core.model.config import TransformerConfig
from ring_attn_core.model.generation import Generation

CONFIG = TransformerConfig(vocab=64, dim=8, depth=1, heads=1)
PLAIN: dict[str, Any] = {"new": [3, 2], "temperature": 1.0, "top_k": 5, "top_p": None, "seed": 3, "stop": [5, 6]}
SAME: list[dict[str, Any]] = [
    {"temperature": 1, "top_p": 1},
    {"seed": np.int64(3), "top_k": np.int32(5), "temperature": np.float64(1)},
    {"new": np.array([3, 2]), "stop": np.array([6, 5])},
    {"new": (np.int64(3), 2), "stop": {6, 5}},
]


def told(**changes: Any) -> str:
    asked = PLAIN | {"chunk": None, "cache_dtype": None} | changes
    return json.dumps(Generation.of(CONFIG, "float32", [[1], [2]], asked.pop("new"), **asked).fingerprint())


def test_a_cache_has_slots_for_the_rank_that_holds_most_of_a_request():
    """The second chunk has 20 tokens in shards of 20: all of them are with the first rank."""
    prompt = [i % 64 for i in range(120)]
    asked = Generation.of(CONFIG, "float32", [prompt], 1, stop=(), chunk=100, cache_dtype=None)
    assert asked.chunks() == [(0, [100], 100), (100, [20], 20)]
    rounded = lambda tokens: -(-tokens // 40) * 40
    assert asked.chunks(rounded) == [(0, [100], 120), (100, [20], 40)]
    assert asked.ids(100, 22) == [[*prompt[100:], 0, 0]]
    assert asked.cache("contiguous", 2, rounded) == {"capacity": 2 * 128, "window": None, "room": None}
    assert asked.cache("contiguous", 2) == {"capacity": 2 * 64, "window": None, "room": None}


def test_ranks_that_mean_the_same_tell_each_other_the_same():
    assert {told(**changes) for changes in SAME} == {told()}
    greedy: dict[str, Any] = {"top_k": None}
    assert told(**greedy, temperature=0) == told(**greedy, temperature=-0.0) != told(**greedy)
    for changes in ({"seed": 4}, {"top_k": 6}, {"top_p": 0.5}, {"new": 3}, {"stop": 5}):
        assert told(**changes) != told()
