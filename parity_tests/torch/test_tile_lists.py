"""The lists of tiles and keys that extents leave to Hopper's kernels, found in Triton's interpreter, against the pairs."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from ring_attn_core import Band, causal, full, sliding_window
from ring_attn_core.data.trees import tree_extents
from ring_attn_core.kernels.portable import extent_launches
from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.runs import Row
from ring_attn_torch.attend import kernels

from ..support.compilation import PLAIN
from ..support.selection import first
from .test_kernels import as_on_a_gpu

Q, K = 8, 4
"""Queries and keys of a tile, so that short rows have many."""


def lists(_: Any, call: Any, arrays: dict[str, np.ndarray], whole: bool) -> tuple[np.ndarray, np.ndarray]:
    from ring_attn_torch.attend.launch import launch

    array_names = {name: torch.from_numpy(x) for name, x in arrays.items()}
    with as_on_a_gpu():
        (array_names["key_bounds"],) = launch(extent_launches.key_bounds(call, K), array_names)
        (array_names["intervals"],) = launch(extent_launches.intervals(call, Q, K, whole), array_names)
        (of_keys,) = launch(extent_launches.query_tiles(call, Q, K), array_names)
    return array_names["intervals"].numpy(), of_keys.numpy()


def drawn(kind: str, batch: int, tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Key extents [batch, tokens, 2]: of trees, of any intervals, or of single keys that only distant queries see."""
    if kind == "tree":
        rows = []
        for _ in range(batch):
            cuts = np.sort(rng.choice(np.arange(1, tokens), rng.integers(2, 12), replace=False))
            parents, path = [-1], [0]
            for segment in range(1, len(cuts) + 1):
                path = path[: rng.integers(0, len(path) + 1)]
                parents.append(path[-1] if path else -1)
                path.append(segment)
            rows.append((parents, np.diff([0, *cuts, tokens]).tolist()))
        return tree_extents([r[0] for r in rows], [r[1] for r in rows])[0]
    if kind == "any":
        return np.sort(rng.integers(0, tokens + 1, (batch, tokens, 2)), -1).astype(np.int32)
    key = np.arange(tokens)
    seen = (key // K % 2 == 0)[:, None] * np.stack([key, np.full(tokens, tokens)], -1)  # every second tile: many gaps
    return np.repeat(seen[None].astype(np.int32), batch, 0)


@dataclass(frozen=True)
class Problem:
    layout: str
    ranks: int
    kind: str
    mask: Band
    extents: bool = False

    def __str__(self) -> str:
        return f"{self.kind}-{self.layout}" + "-extents" * self.extents


PROBLEMS = [
    Problem("zigzag", 2, "tree", causal()),
    Problem("contiguous", 1, "gaps", full()),
    Problem("striped", 3, "any", sliding_window(21, 3), extents=True),
    Problem("zigzag", 2, "any", full(), extents=True),
    Problem("zigzag", 2, "gaps", sliding_window(21, 3)),
    Problem("striped", 3, "tree", causal(), extents=True),
    Problem("striped", 3, "gaps", causal()),
    Problem("contiguous", 1, "tree", causal(), extents=True),
    Problem("contiguous", 1, "any", sliding_window(21, 3)),
]


@pytest.mark.slow
@pytest.mark.parametrize("problem", first(PROBLEMS, 1, 3, "campaign"), ids=str)
def test_lists_hold_the_tiles_that_some_query_sees_and_key_tiles_meet_their_turns(interpreter, problem):
    layout, ranks, kind, mask, extents = (getattr(problem, field.name) for field in fields(problem))
    rng, batch, tokens = np.random.default_rng(0), 1 if kind == "gaps" else 2, (150 if kind == "gaps" else 60) * ranks
    length = tokens - 7
    plan = RingPlan(layout, mask, ranks, tokens // ranks, length=length)
    key_extents = drawn(kind, batch, tokens, rng)
    of_queries = np.sort(rng.integers(0, tokens + 1, (batch, tokens // 6, 2)), -1).repeat(6, 1).astype(np.int32)
    for rank in range(ranks):
        owner = (rank + 1) % ranks
        rows = np.array(plan.rows(rank, (rank - owner) % ranks), np.int32)
        q_positions, k_positions = positions(rows, tokens // ranks, queries=True), positions(rows, tokens // ranks, queries=False)
        array_names = {"key_extents", "extents"} if extents else {"key_extents"}
        call = replace(
            PLAIN, batch=batch, seq_local=tokens // ranks, kv_local=tokens // ranks, q_runs=rows.shape[0], k_runs=rows.shape[1],
            array_names=frozenset(array_names),
        )  # fmt: skip
        arrays = {"rows": rows, "key_extents": taken(key_extents, k_positions), "extents": taken(of_queries, q_positions)}
        pairs = seen(arrays, q_positions, k_positions, mask, length, extents)
        for whole in (True, False):
            found, of_keys = interpreter(1, lists, call, arrays, whole)[0]
            judge(found, of_keys, pairs, rows, whole)


def order_of(_: Any, call: Any, name: str, counts: np.ndarray) -> np.ndarray:
    """Return ``tile_order`` of query tiles that visit ``counts`` [batch, tiles, runs] key tiles by the list ``name``."""
    from ring_attn_torch.attend.launch import launch

    found = np.zeros(
        (*counts.shape, 4 if name == "key_tiles" else extent_launches.HEADER + 2 * extent_launches.INTERVALS), np.int32
    )
    if name == "key_tiles":
        found[..., 0], found[..., 1] = 5, counts + 5
    else:
        found[..., 0] = counts
    with as_on_a_gpu():
        (order,) = launch(extent_launches.tile_order(call, 2), {name: torch.from_numpy(found)})
    return order.numpy()


@pytest.mark.parametrize("name", first(["key_tiles", "intervals"]))
def test_the_query_tiles_that_visit_the_most_key_tiles_come_first(interpreter, name):
    of = frozenset({"extents" if name == "key_tiles" else "key_extents"})
    call = replace(PLAIN, batch=2, seq_local=300, kv_local=300, q_runs=1, k_runs=2, array_names=of)
    counts = np.random.default_rng(0).integers(0, 20, (2, 150, 2))
    found = interpreter(1, order_of, call, name, counts)[0]
    of_tile, tiles = counts.sum(2), np.arange(150)
    np.testing.assert_array_equal(found, [np.lexsort((-tiles, -row)) for row in of_tile])


def ranges(_: Any, call: Any, arrays: dict[str, np.ndarray]) -> np.ndarray:
    from ring_attn_torch.attend.launch import launch

    with as_on_a_gpu():
        (found,) = launch(extent_launches.key_ranges(call), {name: torch.from_numpy(x) for name, x in arrays.items()})
    return found.numpy()


@pytest.mark.parametrize(("layout", "ranks", "mask"), [("zigzag", 2, causal()), ("striped", 3, sliding_window(21, 3))])
def test_the_ranges_of_extents_hold_the_keys_of_a_run_that_each_query_sees(interpreter, layout, ranks, mask):
    rng, slot, length = np.random.default_rng(1), 60, 60 * ranks - 7
    plan = RingPlan(layout, mask, ranks, slot, length=length)
    extents = np.sort(rng.integers(0, length + 1, (2, slot * ranks, 2)), -1).astype(np.int32)
    for rank in range(ranks):
        rows = np.array(plan.rows(rank, 1), np.int32)
        q_positions, k_positions = positions(rows, slot, queries=True), positions(rows, slot, queries=False)
        arrays = {"rows": rows, "extents": taken(extents, q_positions)}
        whole = {"key_extents": np.broadcast_to(np.array([0, length], np.int32), (2, slot, 2))}
        pairs = seen(arrays | whole, q_positions, k_positions, mask, length, extents=True)
        call = replace(
            PLAIN,
            batch=2,
            seq_local=slot,
            kv_local=slot,
            q_runs=rows.shape[0],
            k_runs=rows.shape[1],
            array_names=frozenset({"extents"}),
        )
        found = interpreter(1, ranges, call, arrays)[0]
        j = np.arange(slot // rows.shape[1])
        of_run = (found[:, :, 0, :, None] <= j) & (j < found[:, :, 1, :, None])
        np.testing.assert_array_equal(np.concatenate(list(of_run.swapaxes(0, 1)), -1), pairs)


def test_lists_are_computed_once_for_the_same_extents_and_anew_after_a_change(monkeypatch):
    started = []

    def counted(launch: Any, arrays: Any) -> tuple[torch.Tensor, ...]:
        started.append(launch.kernel)
        return (torch.zeros(1),)

    monkeypatch.setattr(kernels, "launch", counted)
    call = replace(PLAIN, array_names=frozenset({"extents"}))
    arrays = {name: torch.zeros(2, 3, dtype=torch.int32) for name in ("rows", "extents", "kv", "k", "v")}
    add = lambda: kernels._add_lists({**arrays}, (extent_launches.key_ranges(call), extent_launches.not_finite(call, True)))
    add()
    add()
    assert started == ["key_ranges", "not_finite", "not_finite"], "a layer that finds lists again, or no NaN in new values"
    arrays["extents"][0, 0] = 1
    add()
    arrays["extents"] = arrays["extents"].clone()
    add()
    assert started[3:] == ["key_ranges", "not_finite"] * 2
    with torch.inference_mode():
        arrays["extents"] = torch.zeros(2, 3, dtype=torch.int32)
        add()
        add()
    assert started[7:] == ["key_ranges", "not_finite"] * 2, "arrays of inference mode count no changes"


def positions(rows: np.ndarray, slot: int, queries: bool) -> np.ndarray:
    """Global positions of a shard's queries or keys, -1 for padding."""
    runs = rows[:, 0] if queries else rows[0]
    start, length = (Row._fields.index(name) for name in (("q_start", "q_len") if queries else ("k_start", "k_len")))
    i = np.arange(slot // len(runs))
    each = [np.where(i < run[length], run[start] + run[Row._fields.index("stride")] * i, -1) for run in runs]
    return np.concatenate(each)


def taken(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x[:, np.maximum(positions, 0)])


def seen(arrays: dict[str, np.ndarray], i: np.ndarray, j: np.ndarray, mask: Band, length: int, extents: bool) -> np.ndarray:
    """Return which query sees which key, bool [batch, queries, keys]."""
    i, j = i[:, None], j[None, :]
    pairs = (i >= 0) & (j >= 0) & (i < length) & (j < length)
    pairs = pairs & (mask.lo is None or i - j >= mask.lo) & (mask.hi is None or i - j <= mask.hi)
    first, end = np.moveaxis(arrays["key_extents"], -1, 0)
    pairs = pairs[None] & (first[:, None] <= i) & (i < end[:, None])
    if extents:
        first, end = np.moveaxis(arrays["extents"], -1, 0)
        pairs &= (first[:, :, None] <= j) & (j < end[:, :, None])
    return pairs


def judge(found: np.ndarray, of_keys: np.ndarray, pairs: np.ndarray, rows: np.ndarray, whole: bool) -> None:
    batch, q_slot, k_slot = len(pairs), pairs.shape[1] // rows.shape[0], pairs.shape[2] // rows.shape[1]
    q_tiles, k_tiles = -(-q_slot // Q), -(-k_slot // K)
    visited = np.zeros((batch, rows.shape[0], q_tiles, rows.shape[1], k_tiles), bool)
    for b, q_run, m, k_run in np.ndindex(visited.shape[:-1]):
        count, partly, intervals, _ = found[b, q_run * q_tiles + m, k_run, :4]
        assert intervals <= extent_launches.INTERVALS
        listed = [range(*found[b, q_run * q_tiles + m, k_run, 4 + 2 * x : 6 + 2 * x]) for x in range(intervals)]
        order = [tile for interval in listed for tile in interval]
        assert len(order) == count == len(set(order)) and all(listed)
        block = pairs[b, q_run * q_slot :][:q_slot][m * Q : (m + 1) * Q, k_run * k_slot :][:, :k_slot]
        length = rows[q_run, k_run, Row._fields.index("q_len")] - m * Q
        for tile in range(k_tiles):
            inside = block[:, tile * K : (tile + 1) * K]
            assert tile in order or not inside.any(), "a tile that some query sees is left out"
            if tile in order[partly:]:
                assert inside.shape[1] == K and inside[: max(length, 0)].all(), "a tile without a mask that not all queries see"
        assert whole or partly == count
        visited[b, q_run, m, k_run, order] = True
    for b, k_run, tile, q_run in np.ndindex(batch, rows.shape[1], k_tiles, rows.shape[0]):
        first, last, count, _ = of_keys[b, k_run * k_tiles + tile, q_run]
        column = visited[b, q_run, :, k_run, tile]
        assert count == column.sum() and column[first:last].sum() == count, "a turn that nobody takes would stop the sum of dq"
