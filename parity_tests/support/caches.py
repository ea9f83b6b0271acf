"""Requests that come and go in a sharded cache, as data, and a model of the cache one token at a time, in numpy.

A story is a list of operations. Every token that any of them adds has a number of its own, by which its q, k and v are drawn. The
model knows which numbers a request has, in order, and which rank holds which position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from ring_attn_core import causal, sliding_window
from ring_attn_core.cache.spec import CacheSizes
from ring_attn_core.layouts import LAYOUTS
from ring_attn_core.reference.oracle import exact, plain, rounding
from ring_attn_core.reference.tolerance import bound, relative_error

NOTHING = -1
MOST = 400


@dataclass(frozen=True)
class Prefill:
    """A chunk of which each rank has a shard of ``tokens`` tokens, and request ``rows[i]`` the first ``lengths[i]``."""

    tokens: int
    lengths: tuple[int, ...]
    rows: tuple[int, ...] | None = None
    fresh: bool = False


@dataclass(frozen=True)
class Append:
    """``tokens`` more of each request, or those that are ``valid``; not ``kept``: a step that ends before it has advanced."""

    tokens: int
    valid: tuple[tuple[bool, ...], ...] | None = None
    rows: tuple[int, ...] | None = None
    kept: bool = True


@dataclass(frozen=True)
class Call:
    """A method of the cache with its arguments."""

    name: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Story:
    ranks: int
    operations: tuple[Prefill | Append | Call, ...]
    capacity: int | None = 64
    layout: str = "zigzag"
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    v_dim: int = 6
    layers: int = 2
    dtype: str = "float32"
    window: int | None = None
    room: int | None = None
    page: int | None = None
    sinks: bool = False
    softcap: float | None = None

    def __str__(self) -> str:
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "operations"}
        changed = [f"{name}={x}" for name, x in values.items() if name == "ranks" or x != getattr(Story, name)]
        return ",".join(changed)

    @property
    def sizes(self) -> CacheSizes:
        return CacheSizes(self.layers, self.kv_heads, self.head_dim, self.v_dim)

    @property
    def options(self) -> dict[str, Any]:
        """Return what ``KVCache.make`` takes besides the ring."""
        return {"dtype": self.dtype, "window": self.window, "room": self.room, "page": self.page}

    @property
    def compute_dtype(self) -> str:
        return "float32" if self.dtype.startswith("float8") else self.dtype

    @cached_property
    def tokens(self) -> dict[str, np.ndarray]:
        """q [MOST + 1, layers, heads, head_dim], k, v of every number; the last is what stands where no token is, NaN."""
        rng = np.random.default_rng(7)
        heads = {"q": (self.heads, self.head_dim), "k": (self.kv_heads, self.head_dim), "v": (self.kv_heads, self.v_dim)}
        drawn = {name: rng.standard_normal((MOST + 1, self.layers, *shape)) for name, shape in heads.items()}
        rounded = {name: rounding(self.compute_dtype)(x.astype(np.float32)).astype(np.float64) for name, x in drawn.items()}
        for x in rounded.values():
            x[-1] = np.nan
        return rounded

    @property
    def features(self) -> dict[str, Any]:
        """Return the arguments of prefill that the attention has; sinks in float32."""
        sinks = {"sinks": np.linspace(-1, 1, self.heads, dtype=np.float32)} if self.sinks else {}
        return sinks | ({"softcap": self.softcap} if self.softcap else {})

    def script(self) -> list[tuple[Prefill | Append | Call, np.ndarray]]:
        """The operations, each with the numbers of its new tokens [requests, tokens], in natural order; NOTHING for padding."""
        number, lines = 0, []
        for operation in self.operations:
            numbers = np.zeros((0, 0), int)
            if not isinstance(operation, Call):
                rows = range(self.batch) if operation.rows is None else operation.rows
                width = operation.tokens * (self.ranks if isinstance(operation, Prefill) else 1)
                numbers = np.full((len(rows), width), NOTHING)
                for i in range(len(rows)):
                    if isinstance(operation, Prefill):
                        real = np.arange(width) < operation.lengths[i]
                    else:
                        real = np.array(operation.valid[i]) if operation.valid else np.ones(width, bool)
                    numbers[i, real] = number + np.arange(real.sum())
                    number += real.sum()
            lines.append((operation, numbers))
        assert number <= MOST
        return lines

    def shard(self, numbers: np.ndarray, rank: int) -> np.ndarray:
        """A rank's part of a chunk's ``numbers``."""
        runs = LAYOUTS[self.layout](rank, self.ranks, numbers.shape[1] // self.ranks)
        return numbers[:, [p for run in runs for p in run.positions()]]


@dataclass
class Model:
    """``requests``: the numbers of each one's tokens. ``ranks``: for each, the positions that every rank holds, in order."""

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
        """It changes nothing that a model of endless ranks could see."""

    def fork(self, source: int, target: Sequence[int]) -> None:
        for row in target:
            self.requests[row] = list(self.requests[source])
            self.ranks[row] = [list(held) for held in self.ranks[source]]

    def check(self, snapshots: Sequence[dict[str, np.ndarray]]) -> None:
        """Assert that every rank's cache is the model's: who holds what, and the very keys and values."""
        for rank, got in enumerate(snapshots):
            for row, request in enumerate(self.requests):
                assert got["lengths"][row] == len(request)
                assert got["counts"][row].tolist() == [len(held) for held in self.ranks[row]]
                slots = {int(p): slot for slot, p in enumerate(got["positions"][row]) if p >= 0}
                expected = self.ranks[row][rank]
                if self.story.window is not None:  # what a query sees, or sees once the request went back as far as it may
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
        """[tokens, heads, v_dim]: of every token of a request, in float64 or as a device computes it in ``dtype``."""
        story = self.story
        q, k, v = (story.tokens[name][self.requests[row], layer][None] for name in "qkv")
        mask = causal() if story.window is None else sliding_window(story.window)
        dout = np.zeros((*q.shape[:3], v.shape[-1]))
        if dtype is None:
            return exact(q, k, v, mask, dout, **story.features).out[0]
        return plain(q, k, v, mask, dout, dtype, **story.features).out[0]

    def worst(self, operation: Prefill, numbers: np.ndarray, outs: Sequence[np.ndarray]) -> float:
        """The error of a chunk's ``outs`` of all ranks, [layers, requests, tokens, ...] each, over its bound; padding is 0.

        To be asked once the chunk has been played.
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
        """Attention in float64 of q [layers, n, heads, d] over the parts of all ranks, by positions alone."""
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


def check(story: Story, played: Sequence[Sequence[dict[str, Any]]]) -> float:
    """Compare what a framework ``played``, [operations][ranks], with the model; the worst error of prefill over its bound."""
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
    """Attention of the new tokens over the parts of the cache, before the step has advanced, is that over the whole request."""
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


WIDEST = 11
"""The most tokens of a chunk in EVERYTHING."""

EVERYTHING = (
    Prefill(0, (11, 4), fresh=True),
    Append(1),
    Prefill(0, (5, 7)),
    Append(3, ((True, False, True), (False, True, True))),
    Append(3, kept=False),
    Append(3),
    Append(3),
    Call("rollback", ((17, 11),)),
    Append(3, ((True, True, False), (False, False, False))),
    Call("fork", (0, (1,))),
    Call("evict", (0,)),
    Prefill(0, (2, 1)),
    Append(1),
    Call("reset", ((1,),)),
)
"""Ragged chunks, appends of different numbers, a step that stops, going back into a chunk, a copy, an emptied request."""


ONE_REQUEST = (Prefill(0, (3,), rows=(1,)), Append(1, rows=(1,)))
"""What a step of one of the requests is."""


def everything(ranks: int, then: Sequence[Prefill | Append] = (), **changes: Any) -> Story:
    """EVERYTHING on so many ranks, each of which has shards that are long enough for the widest chunk."""
    local = -(-WIDEST // ranks)
    wide = lambda x: replace(x, tokens=local + local % 2) if isinstance(x, Prefill) else x
    return Story(ranks, tuple(map(wide, (*EVERYTHING, *then))), **changes)


CHOSEN = [
    everything(2, ONE_REQUEST, layout="contiguous", sinks=True, capacity=80),
    everything(3, window=6, room=12, capacity=20, dtype="bfloat16"),
    everything(8, kv_heads=4, v_dim=8, capacity=100),
]
REST = [
    everything(1, ONE_REQUEST),
    everything(3, layout="striped", heads=3, kv_heads=1, softcap=5.0),
    everything(4, dtype="bfloat16"),
    everything(2, ONE_REQUEST, window=4, room=12, capacity=None, layout="contiguous"),
    everything(4, window=11, room=12, capacity=None, layout="striped", sinks=True),
]
