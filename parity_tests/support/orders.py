"""Cases of ``order="global"``, and the comparison of their bits over numbers of ranks and layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ring_attn_core import causal, full, sliding_window
from ring_attn_core.layouts import find_layout
from ring_attn_core.reference.oracle import Attention

from .balanced import DOCUMENTS, case_of
from .cases import Case, check
from .combinations import COMBINATIONS
from .models import Arrays, layer_weights

ORDERED: dict[str, Case] = {
    "softcap and sinks": Case(heads=3, kv_heads=1, softcap=2.0, sinks=True),
    "documents in a window": Case(mask=sliding_window(9), extents="documents", dtype="bfloat16"),
    "causal": Case(),
    "full": Case(mask=full(), kv_heads=4),
    "dropout and ALiBi": Case(alibi=True, dropout_rate=0.3, v_dim=7, key_mask="random"),
    "cross-attention": Case(mask=sliding_window(20, 11), kv_length=50, key_extents="any", sinks=True),
    "values in keys": Case(head_dim=24, kv_heads=1, values_in_keys=True, dtype="float64"),
    "few tokens": Case(length=3, sinks=True),
    "tiles of users": Case(length=611, batch=1, heads=2, tiles=None),
}
"""A case for each feature, all of odd length, so that a ring has padding; and any two features under a causal mask."""

ORDERED_KERNELS = [
    Case(length=75, batch=1, heads=2, kv_heads=1, sinks=True, dtype="float16"),
    Case(length=150, batch=2, heads=2, kv_heads=1, softcap=2.0, sinks=True, dtype="float16"),
    Case(length=101, batch=1, heads=2, kv_heads=1, mask=sliding_window(20), extents="documents", alibi=True, dropout_rate=0.3),
    Case(length=101, batch=1, heads=2, kv_heads=1, key_mask="random", key_extents="any", dtype="float16"),
    Case(length=101, batch=1, heads=2, kv_heads=1, mask=full(), kv_length=130, dtype="float16"),
]
KERNEL_RINGS: list[dict[str, Any]] = [
    {"ranks": 2, "layout": "zigzag"},
    {"ranks": 3, "layout": "contiguous"},
    {"ranks": 2, "layout": "striped"},
    {"ranks": 3, "layout": "zigzag"},
]

RINGS: list[dict[str, Any]] = [
    {"ranks": 2, "layout": "contiguous", "more_slots": 3},
    {"ranks": 3, "layout": "zigzag"},
    {"ranks": 4, "layout": "striped"},
]
MORE_RINGS = [{"ranks": ranks, "layout": layout} for ranks in (2, 3, 4, 8) for layout in ("zigzag", "contiguous", "striped")]

BALANCED = case_of(1, extents="documents", mask=causal(), sinks=True)
BALANCED_RINGS: list[dict[str, Any]] = [
    {"ranks": ranks, "layout": case_of(ranks, more, mask=causal()).layout} for ranks, more in ((2, 0), (4, 2))
] + [{"ranks": 3, "layout": "zigzag"}]
"""The layouts of the documents of ``BALANCED``, whose one rank holds all of them, and one that knows no documents."""

TWO_FEATURES = COMBINATIONS

IN_LOSS: list[tuple[int, str]] = [(1, "contiguous"), (1, "striped"), (2, "zigzag"), (4, "striped")]
"""Rings of which a loss has the same bits. On one rank "striped" stands for another order of the tokens."""


def selections() -> Arrays:
    """Return weights of a layer that select features, so that matrix products are exact in any order of their sums."""
    return {name: np.eye(*x.shape, dtype=x.dtype) for name, x in layer_weights().items()}


def loss_data(ranks: int, layout: str) -> tuple[list[np.ndarray], np.ndarray]:
    """Return logits [2 64 1003], labels and weights in another order of tokens for each ring, and that order."""
    rng = np.random.default_rng(5)
    logits = (3 * rng.standard_normal((2, 64, 1003))).astype(np.float32)
    labels = np.where(rng.random((2, 64)) < 0.3, -100, rng.integers(0, 1003, (2, 64))).astype(np.int32)
    weights = (1e-3 * rng.random((2, 64))).astype(np.float32)
    order = np.concatenate([[*run.positions()] for rank in range(ranks) for run in find_layout(layout)(rank, ranks, 64 // ranks)])
    order = np.arange(64).reshape(8, 8).T.reshape(-1) if (ranks, layout) == (1, "striped") else order
    return [x[:, order] for x in (logits, labels, weights)], order


def check_bits(case: Case, run: Callable[[Case], Attention], rings: Sequence[dict[str, Any]] = RINGS) -> None:
    """Assert that results of ``case`` are exact on one rank and on ``rings``, and have the same bits on all of them."""
    case = replace(case, order="global", ranks=1, strategy="auto")
    case = case.given(**case.features)  # drawn for one rank, because a key mask may be drawn by shards
    expected = run(case)
    check(case, expected)
    for ring in rings:
        on_ring = replace(case, **ring)
        check(on_ring, got := run(on_ring))
        check_same_bits(case, expected, got, str(ring))


def check_same_bits(case: Case, a: Attention, b: Attention, message: str, tokens: slice | None = None) -> None:
    """Assert that two results have equal bits at all true tokens, or at ``tokens`` alone."""
    for name, x, y in zip(Attention._fields, a, b, strict=True):
        if x is None or y is None or (tokens and name == "dsinks"):
            continue
        if name != "dsinks":
            cut = tokens or slice(0, case.plan.kv_length if name in ("dk", "dv") else case.length)
            x, y = x[:, cut], y[:, cut]
        assert np.ascontiguousarray(x).tobytes() == np.ascontiguousarray(y).tobytes(), f"{name} has other bits: {message}"


def check_other_documents(run: Callable[[Case], Attention], **ring: Any) -> None:
    """Assert that arrays of other documents in the row change no bit of a document, on one rank and on a ring."""
    case = replace(BALANCED, order="global")
    start, end = sum(DOCUMENTS[:2]), sum(DOCUMENTS[:3])
    ends = np.cumsum(DOCUMENTS)
    own = np.stack([np.repeat(ends - DOCUMENTS, DOCUMENTS), np.repeat(ends, DOCUMENTS)], -1).astype(np.int32)
    inside = (np.arange(case.length) >= start) & (np.arange(case.length) < end)
    others = lambda x: np.where(inside.reshape(-1, *[1] * (x.ndim - 2)), x, -3 * x)
    case = case.given(extents=np.broadcast_to(own, (case.batch, *own.shape)).copy())
    changed = case.given(**{name: others(x) for name, x in case.arrays.items()})
    results = [run(each) for each in (case, changed, replace(changed, **ring))]
    for got in results[1:]:
        assert (got.out[:, :start] != results[0].out[:, :start]).any()
        check_same_bits(case, results[0], got, "another document changed", slice(start, end))
