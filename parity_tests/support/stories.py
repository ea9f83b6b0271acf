"""Requests that come and go in a sharded cache, as data.

A story is a list of operations. Each token that an operation adds has a unique number, by which its q, k and v are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from ring_attn_core.cache.spec import CacheSizes
from ring_attn_core.layouts import LAYOUTS
from ring_attn_core.reference.oracle import rounding

NOTHING = -1
MOST = 400


@dataclass(frozen=True)
class Prefill:
    """A chunk: each rank has a shard of ``tokens`` tokens, and request ``rows[i]`` takes the first ``lengths[i]`` of it."""

    tokens: int
    lengths: tuple[int, ...]
    rows: tuple[int, ...] | None = None
    fresh: bool = False


@dataclass(frozen=True)
class Append:
    """A step of ``tokens`` new tokens of each request, or of the ``valid`` ones. If not ``kept``, ``advance`` is not called."""

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
    alibi: bool = False
    length: int | None = None

    def __str__(self) -> str:
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "operations"}
        changed = [f"{name}={x}" for name, x in values.items() if name == "ranks" or x != getattr(Story, name)]
        return ",".join(changed)

    @property
    def sizes(self) -> CacheSizes:
        return CacheSizes(self.layers, self.kv_heads, self.head_dim, self.v_dim)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of ``KVCache.make`` besides the ring."""
        return {"dtype": self.dtype, "window": self.window, "room": self.room, "page": self.page}

    @property
    def compute_dtype(self) -> str:
        return "float32" if self.dtype.startswith("float8") else self.dtype

    @cached_property
    def tokens(self) -> dict[str, np.ndarray]:
        """The arrays q [MOST + 1, layers, heads, head_dim], k and v of every number; the last entry, NaN, stands for no token."""
        rng = np.random.default_rng(7)
        heads = {"q": (self.heads, self.head_dim), "k": (self.kv_heads, self.head_dim), "v": (self.kv_heads, self.v_dim)}
        drawn = {name: rng.standard_normal((MOST + 1, self.layers, *shape)) for name, shape in heads.items()}
        rounded = {name: rounding(self.compute_dtype)(x.astype(np.float32)).astype(np.float64) for name, x in drawn.items()}
        for x in rounded.values():
            x[-1] = np.nan
        return rounded

    @property
    def features(self) -> dict[str, Any]:
        """The optional arguments of prefill; sinks in float32."""
        sinks = {"sinks": np.linspace(-1, 1, self.heads, dtype=np.float32)} if self.sinks else {}
        slopes = {"alibi_slopes": 2.0 ** -np.arange(1, self.heads + 1, dtype=np.float32)} if self.alibi else {}
        return sinks | slopes | ({"softcap": self.softcap} if self.softcap else {})

    @property
    def of_prefill(self) -> dict[str, Any]:
        """The optional arguments of prefill, under order="global" if the story has a length."""
        return self.features | ({} if self.length is None else {"order": "global", "length": self.length})

    def script(self) -> list[tuple[Prefill | Append | Call, np.ndarray]]:
        """Return the operations with their new tokens' numbers [requests, tokens], in natural order; NOTHING for padding."""
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
        """Return a rank's part of a chunk's ``numbers``."""
        runs = LAYOUTS[self.layout](rank, self.ranks, numbers.shape[1] // self.ranks)
        return numbers[:, [p for run in runs for p in run.positions()]]


WIDEST = 11
"""The largest number of tokens of a chunk in EVERYTHING."""

EVERYTHING = (
    Prefill(0, (11, 4)),
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
"""Ragged chunks, appends of different numbers, a step that stops, a rollback into a chunk, a fork, a reset request."""


LONG = (
    Prefill(10, (18, 7), fresh=True),
    Append(1),
    Append(3, kept=False),
    Call("rollback", ((18, 7),)),
    Prefill(2, (3, 0)),
    Append(4),
)
"""With a window: shards of 10 tokens on ranks of 7 slots, which keep the last 7, and the longest rollback."""

FULL = (Prefill(6, (5, 2)), Append(3, ((True, True, True), (True, False, True))), Call("rollback", ((6, 4),)), Append(2))
"""Shards of 6 tokens, padding included, on two ranks of 4 slots: a prompt of 5 tokens, and a step that fills all slots."""


ONE_REQUEST = (Prefill(0, (3,), rows=(1,)), Append(1, rows=(1,)))
"""A prefill and a step of one of the requests."""


IN_ORDER = (
    Prefill(50, (1, 1), fresh=True),
    Prefill(50, (7, 0)),
    Prefill(50, (32, 32)),
    Append(3, ((True, True, True), (False, True, True))),
    Call("rollback", ((42, 30),)),
    Append(1),
    Prefill(50, (100, 97)),
    Prefill(50, (7, 7)),
)
"""Chunks of 1, 7, 32 and 100 tokens, and tokens of steps between them, in shards of 50 tokens on at least 2 ranks."""
WHOLE = (Prefill(150, (150, 135), fresh=True),)
AFTER_A_ROLLBACK = (*WHOLE, Call("rollback", ((140, 20),)), Prefill(50, (10, 90)), Prefill(50, (3,), rows=(1,)))
ORDERED = [
    Story(2, IN_ORDER, 300, heads=10, sinks=True, softcap=2.0, layers=1, length=150),
    Story(4, IN_ORDER, 600, "striped", window=37, room=200, layers=1, length=150, dtype="bfloat16"),
    Story(1, WHOLE, 150, "contiguous", heads=10, layers=1, length=150),
    Story(3, AFTER_A_ROLLBACK, 600, "contiguous", alibi=True, layers=1, length=160),
    Story(2, IN_ORDER, 300, "striped", heads=10, kv_heads=1, layers=1, length=150, dtype="float64"),
]
"""Stories under order="global". With 20 or more heads in a batch the backend "blockwise" has tiles of 128 tokens."""


def everything(ranks: int, then: Sequence[Prefill | Append] = (), **changes: Any) -> Story:
    """Return EVERYTHING on ``ranks`` ranks, with shards long enough for the widest chunk."""
    local = -(-WIDEST // ranks)
    wide = lambda x: replace(x, tokens=local + local % 2) if isinstance(x, Prefill) else x
    return Story(ranks, tuple(map(wide, (*EVERYTHING, *then))), **changes)


CHOSEN = [
    Story(2, LONG, window=3, room=4, capacity=None),
    Story(2, FULL, capacity=8),
    everything(2, layout="contiguous", sinks=True, capacity=80),
    everything(3, window=6, room=12, capacity=20, dtype="bfloat16"),
]
REST = [
    everything(8, kv_heads=4, v_dim=8, capacity=100),
    everything(1, ONE_REQUEST),
    everything(3, layout="striped", heads=3, kv_heads=1, softcap=5.0),
    everything(4, dtype="bfloat16"),
    everything(2, ONE_REQUEST, window=4, room=12, capacity=None, layout="contiguous"),
    everything(4, window=11, room=16, capacity=None, layout="striped", sinks=True),
]
