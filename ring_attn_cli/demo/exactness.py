"""The exactness part of the demo: q, k and v made from text, exact attention in float64, and the bounds of the error."""

from __future__ import annotations

import time
from collections.abc import Mapping
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from ring_attn_core.reference import oracle
from ring_attn_core.reference.oracle import Attention
from ring_attn_core.reference.tolerance import bound, relative_error
from ring_attn_core.runs import Band

from ..compare.cases import Case
from ..compare.oracles import ORACLES, GlobalArrays
from ..compare.orders import Order, Outcome
from ..compare.orders import joined as in_order
from ..compare.variants import both
from ..processes import Report
from .judge import Check
from .settings import DemoSettings
from .text import VOCAB, standard_library

PARTS = {"ring": "over the ring", "one device": "on one device"}
"""The two computations of each framework, by name, and their descriptions in progress messages."""

COMPARED = "out", "lse", "dq", "dk", "dv"
"""The results of attention that are compared: all fields of Attention but dsinks, because the demo has no sinks."""

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
CLOSE = 1e-6
"""Bound of the relative difference of two float32 results: of two frameworks, or of a ring and one device."""


class DemoInputs(NamedTuple):
    """q and dout [1 s h d], k and v [1 s g d], dlse [1 s h]: float32 global sequences in natural order."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    dlse: np.ndarray

    @property
    def of_attention(self) -> GlobalArrays:
        return GlobalArrays({"q": self.q, "k": self.k, "v": self.v}, ("q", "k", "v"), {"out": self.dout, "lse": self.dlse})


class DemoResult(NamedTuple):
    """Attention of global sequences in natural order, and the seconds that it took."""

    attention: Attention
    seconds: float

    @classmethod
    def of(cls, order: Order, outcomes: list[Outcome], began: float) -> DemoResult:
        """Join the shards in ``outcomes``, the answers of all processes. ``began``: ``time.perf_counter()`` at the start."""
        shards = {name: [x for outcome in outcomes for x in outcome.shards[name]] for name in COMPARED}
        whole = in_order(shards, ORACLES[order.oracle].sharded, order.case.plan(order.ranks))
        return cls(Attention(**whole), time.perf_counter() - began)


class DemoTruth(NamedTuple):
    """Attention of some heads, ``exact`` in float64, and ``plain`` as in float32 on one device, whose error gives the bounds.
    ``seconds``: of both computations, in the slowest process."""

    exact: Attention
    plain: Attention
    seconds: float


def inputs(tokens: int) -> DemoInputs:
    """Return inputs for ``tokens`` bytes of text: bytes and positions, embedded and projected by random weights of a fixed seed.
    The positions give each token its own q, k and v, so that a misplaced token changes the result."""
    rng = np.random.default_rng(0)
    width = 64
    ids = np.frombuffer(standard_library(tokens), np.uint8)
    angles = np.arange(tokens)[:, None] * 10000.0 ** -np.arange(0, 1, 2 / width)
    x = rng.standard_normal((VOCAB, width))[ids] + np.concatenate([np.sin(angles), np.cos(angles)], 1)

    def projected(heads: int) -> np.ndarray:
        y = x @ rng.standard_normal((width, heads * HEAD_DIM)) / (x.std() * width**0.5)
        return y.reshape(1, tokens, heads, HEAD_DIM).astype(np.float32)

    random = lambda *dims: rng.standard_normal((1, tokens, HEADS, *dims), np.float32)
    return DemoInputs(projected(HEADS), projected(KV_HEADS), projected(KV_HEADS), random(HEAD_DIM), random())


def orders(settings: DemoSettings, framework: str) -> dict[str, Order]:
    """Return a request to compute attention for each name in ``PARTS``. ``framework``: "torch" or "jax"."""
    case = Case(heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, length=settings.tokens, layout=settings.layout)
    call, rings = both("ring")[framework], zip(PARTS, (settings.ranks, 1), strict=True)
    return {part: Order("prepare", call, case, ranks, "attention") for part, ranks in rings}


def work(report: Report, inputs: DemoInputs, mask: Band, kv_head: int) -> None:
    """Compute one key head's attention exactly, in float64, and plainly, in float32, and report it as a ``DemoTruth``."""
    began = time.perf_counter()
    q, k, v, dout, dlse = (np.split(x, KV_HEADS, 2)[kv_head] for x in inputs)
    exact = oracle.exact(q, k, v, mask, dout, dlse)
    plain = oracle.plain(q, k, v, mask, dout, "float32", dlse)
    report("truth", (kv_head, DemoTruth(exact, plain, time.perf_counter() - began)))


def joined(parts: Mapping[int, DemoTruth]) -> DemoTruth:
    """Return the exact and plain results of all heads. ``parts``: by key head, the results of this head and its query heads."""
    inorder = [parts[kv_head] for kv_head in range(KV_HEADS)]
    whole = lambda truths: Attention(*(np.concatenate([t[i] for t in truths], 2) for i in range(len(COMPARED))))
    return DemoTruth(whole([p.exact for p in inorder]), whole([p.plain for p in inorder]), max(p.seconds for p in inorder))


class CheckRow(NamedTuple):
    """The relative differences of one array of the ring, such as dq: by framework, from ``exact`` and from ``one_device``.
    ``frameworks``: the difference between the two rings; None if only one framework ran."""

    name: str
    exact: dict[str, Check]
    one_device: dict[str, Check]
    frameworks: Check | None

    @property
    def checks(self) -> list[Check]:
        return [*self.exact.values(), *self.one_device.values(), *([self.frameworks] if self.frameworks else [])]


def rows(truth: DemoTruth, rings: Mapping[str, Attention], one_device: Mapping[str, Attention]) -> list[CheckRow]:
    """Return one row for each of out, lse, dq, dk and dv. ``rings`` and ``one_device`` map a framework to its result."""
    return [_row(name, truth, rings, one_device) for name in COMPARED]


def _row(name: str, truth: DemoTruth, rings: Mapping[str, Attention], one_device: Mapping[str, Attention]) -> CheckRow:
    of = attrgetter(name)
    limit = bound(of(truth.plain), of(truth.exact), "float32")
    exact, alone = {}, {}
    for framework, ring in rings.items():
        error, apart = relative_error(of(ring), of(truth.exact)), relative_error(of(ring), of(one_device[framework]))
        exact[framework] = Check(f"{name}: {framework} ring against exact float64", error, limit)
        alone[framework] = Check(f"{name}: {framework} ring against one device", apart, CLOSE)
    if len(rings) != 2:
        return CheckRow(name, exact, alone, None)
    (a, ring_a), (b, ring_b) = rings.items()
    return CheckRow(
        name, exact, alone, Check(f"{name}: {a} ring against {b} ring", relative_error(of(ring_a), of(ring_b)), CLOSE)
    )
