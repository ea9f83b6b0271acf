"""A reference of a sharded cache in numpy, one token at a time, and the check of a framework's results against it.

The reference records the numbers of each request's tokens, in order, and the positions that each rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ring_attn_core import causal, sliding_window
from ring_attn_core.reference.oracle import exact, plain
from ring_attn_core.reference.tolerance import bound, relative_error

from .stories import NOTHING, Append, Call, Prefill, Story


@dataclass
class Model:
    """A reference cache. ``requests``: each request's token numbers. ``ranks``: for each request, the positions on each rank.

    Both are in order of position.
    """

    story: Story
    requests: list[list[int]] = field(default_factory=list)
    ranks: list[list[list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.requests = [[] for _ in range(self.story.batch)]
        self.ranks = [[[] for _ in range(self.story.ranks)] for _ in range(self.story.batch)]

    def play(self, operation: Prefill | Append | Call, numbers: np.ndarray) -> None:
        if isinstance(operation, Call):
            getattr(self, operation.name)(*operation.arguments)
        elif isinstance(operation, Prefill):
            for i, row in enumerate(operation.rows or range(self.story.batch)):
                before = len(self.requests[row])
                for rank in range(self.story.ranks):
                    shard = self.story.shard(numbers, rank)[i]
                    place = {number: before + p for p, number in enumerate(numbers[i])}
                    self.ranks[row][rank] += [place[number] for number in shard if number != NOTHING]
                self.requests[row] += [n for n in numbers[i] if n != NOTHING]
        else:
            for i, row in enumerate(operation.rows or range(self.story.batch)):
                for number in numbers[i][numbers[i] != NOTHING]:
                    fewest = min(self.ranks[row], key=len)  # the first of several
                    fewest.append(len(self.requests[row]))
                    self.requests[row].append(number)

    def rollback(self, lengths: Sequence[int]) -> None:
        for row, length in enumerate(lengths):
            self.requests[row] = self.requests[row][:length]
            self.ranks[row] = [[p for p in held if p < length] for held in self.ranks[row]]

    def reset(self, rows: Sequence[int] | int | None = None) -> None:
        for row in range(self.story.batch) if rows is None else [rows] if isinstance(rows, int) else rows:
            self.requests[row], self.ranks[row] = [], [[] for _ in range(self.story.ranks)]

    evict = reset

    def reserve(self, tokens: int) -> None:
        """Do nothing: the model's ranks are unlimited."""

    def fork(self, source: int, target: Sequence[int]) -> None:
        for row in target:
            self.requests[row] = list(self.requests[source])
            self.ranks[row] = [list(held) for held in self.ranks[source]]

    def check(self, snapshots: Sequence[dict[str, np.ndarray]]) -> None:
        """Assert that every rank's cache equals the model's: positions by rank, keys and values."""
        for rank, got in enumerate(snapshots):
            for row, request in enumerate(self.requests):
                assert got["lengths"][row] == len(request)
                assert got["counts"][row].tolist() == [len(held) for held in self.ranks[row]]
                slots = {int(p): slot for slot, p in enumerate(got["positions"][row]) if p >= 0}
                expected = self.ranks[row][rank]
                if self.story.window is not None:  # the tokens that a query sees, now or after the largest rollback
                    assert set(slots) <= set(expected)
                    expected = [p for p in expected if p >= len(request) - self.story.window]
                    assert set(expected) <= set(slots)
                else:
                    assert list(slots) == expected
                    assert list(slots.values()) == list(range(len(expected)))
                for name in "kv":
                    held = got[name][:, row, [slots[p] for p in expected]]
                    truth = self.story.tokens[name][[request[p] for p in expected]].swapaxes(0, 1)
                    if not self.story.dtype.startswith("float8"):
                        np.testing.assert_array_equal(held, truth)

    def attention(self, row: int, layer: int, dtype: str | None = None) -> np.ndarray:
        """Return a request's attention [tokens, heads, v_dim], in float64, or as a device computes it in ``dtype``."""
        story = self.story
        q, k, v = (story.tokens[name][self.requests[row], layer][None] for name in "qkv")
        mask = causal() if story.window is None else sliding_window(story.window)
        dout = np.zeros((*q.shape[:3], v.shape[-1]))
        if dtype is None:
            return exact(q, k, v, mask, dout, **story.features).out[0]
        return plain(q, k, v, mask, dout, dtype, **story.features).out[0]

    def worst(self, operation: Prefill, numbers: np.ndarray, outs: Sequence[np.ndarray]) -> float:
        """Return the largest error over its bound of a chunk's ``outs`` of all ranks, each [layers, requests, tokens, ...].

        Play the chunk first. Assert that padding is 0.
        """
        worst = 0.0
        for i, row in enumerate(operation.rows or range(self.story.batch)):
            new = operation.lengths[i]
            of_number = {n: p for p, n in enumerate(self.requests[row])}
            for layer in range(self.story.layers if new else 0):
                got = np.zeros((new, *outs[0].shape[3:]))
                for rank, out in enumerate(outs):
                    shard = self.story.shard(numbers, rank)[i]
                    assert not out[layer, i][shard == NOTHING].any()
                    for token in np.flatnonzero(shard != NOTHING):
                        got[of_number[shard[token]] - len(self.requests[row]) + new] = out[layer, i, token]
                truth, naive = (self.attention(row, layer, dtype)[-new:] for dtype in (None, self.story.compute_dtype))
                worst = max(worst, relative_error(got, truth) / bound(naive, truth, self.story.compute_dtype))
        return worst

    def attend_parts(self, row: int, i: int, parts: Sequence[dict[str, np.ndarray]], q: np.ndarray, positions: np.ndarray) -> Any:
        """Return the float64 attention of q [layers, n, heads, d] over the parts of all ranks, by positions alone."""
        story, out = self.story, []
        for layer in range(story.layers):
            k, v, p = (
                np.concatenate([part[name][layer, i] if name != "p" else part[name][i] for part in parts]) for name in "kvp"
            )
            seen = (p >= 0) & (p <= positions[:, None]) & (positions[:, None] - p <= (story.window or 2**30))
            k, v = (np.repeat(np.where((p >= 0)[:, None, None], x, 0), story.heads // story.kv_heads, 1) for x in (k, v))
            scores = np.einsum("nhd,thd->hnt", q[layer], k) * story.head_dim**-0.5
            scores = story.softcap * np.tanh(scores / story.softcap) if story.softcap else scores
            weights = np.exp(np.where(seen, scores, -np.inf))
            sink = np.exp(story.features.get("sinks", np.full(story.heads, -np.inf)).astype(float))[:, None, None]
            out.append(np.einsum("hnt,the->nhe", weights / (weights.sum(-1, keepdims=True) + sink), v))
        return np.stack(out)


def check_order(story: Story, played: Sequence[Sequence[dict[str, Any]]], forward: Callable[..., np.ndarray]) -> None:
    """Assert that prefill gives each token the bits of ``forward(q, k, v)``, of the whole sequence with one layer of the story.

    The tokens that a request does not reach, or has only for a while, are others in ``forward``.
    """
    model = Model(story)
    positions: list[list[tuple[int, int, int, np.ndarray]]] = []
    assert story.length is not None
    for (operation, numbers), ranks in zip(story.script(), played, strict=True):
        model.play(operation, numbers)
        if isinstance(operation, Prefill):
            for rank, got in enumerate(ranks):
                rows = operation.rows or range(len(model.requests))
                for row, shard, out in zip(rows, story.shard(numbers, rank), got["out"][0], strict=True):
                    at = {number: p for p, number in enumerate(model.requests[row])}
                    positions.append([(row, at[n], n, out[i]) for i, n in enumerate(shard) if n != NOTHING])
    numbers = np.array([[*request, *[NOTHING] * (story.length - len(request))] for request in model.requests])
    q, k, v = (np.nan_to_num(story.tokens[name][numbers, 0], nan=0.3) for name in "qkv")
    expected = forward(q, k, v)
    compared = [(expected[row, p], out) for chunk in positions for row, p, n, out in chunk if numbers[row, p] == n]
    assert len(compared) > story.length
    assert all(np.array_equal(a, b) for a, b in compared)


def check(story: Story, played: Sequence[Sequence[dict[str, Any]]]) -> float:
    """Compare the results ``played`` [operations][ranks] with the model. Return the worst prefill error over its bound."""
    model, worst = Model(story), 0.0
    for (operation, numbers), ranks in zip(story.script(), played, strict=True):
        if isinstance(operation, Append):
            _check_parts(model, operation, numbers, ranks)
        if not isinstance(operation, Append) or operation.kept:
            model.play(operation, numbers)
        model.check([got["cache"] for got in ranks])
        if isinstance(operation, Prefill):
            worst = max(worst, model.worst(operation, numbers, [got["out"] for got in ranks]))
    assert worst <= 1, worst
    return worst


def _check_parts(model: Model, operation: Append, numbers: np.ndarray, ranks: Sequence[dict[str, Any]]) -> None:
    """Assert that attention of new tokens over the cache's parts, before ``advance``, equals that over the whole request."""
    story = model.story
    after = Model(story)
    after.requests = [list(x) for x in model.requests]
    after.ranks = [[list(held) for held in row] for row in model.ranks]
    after.play(operation, numbers)
    for i, row in enumerate(operation.rows or range(story.batch)):
        real = numbers[i] != NOTHING
        for got in ranks:
            positions = got["positions"][i]
            assert positions[real].tolist() == list(range(len(model.requests[row]), len(after.requests[row])))
            assert (positions[~real] == -1).all()
        if real.any() and not story.dtype.startswith("float8"):
            q = story.tokens["q"][numbers[i][real]].swapaxes(0, 1)
            got = after.attend_parts(row, i, [x["part"] for x in ranks], q, ranks[0]["positions"][i][real])
            truth = np.stack([after.attention(row, layer)[-real.sum() :] for layer in range(story.layers)])
            np.testing.assert_allclose(got, truth, rtol=1e-9, atol=1e-9)
