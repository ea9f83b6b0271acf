"""Cases of attention in a balanced layout: many runs of unequal length on each rank, with features and strategies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ring_attn_core import Gather, TwoLevel, Ulysses, causal, full, sliding_window
from ring_attn_core.data.balanced_trees import balanced_tree_layout
from ring_attn_core.data.trees import tree_extents
from ring_attn_core.plan.balanced import balanced_layout, layout_of_ids
from ring_attn_core.plan.balanced_layout import BalancedLayout
from ring_attn_core.reference.oracle import exact, plain
from ring_attn_core.reference.tolerance import bound, relative_error

from .cases import Case
from .rollouts import drawn_tree

DOCUMENTS = (5, 1, 12, 3, 8, 2, 2, 17, 4, 6, 1)
"""Tokens of documents, 61 in all."""


def case_of(ranks: int, more: int = 0, **options) -> Case:
    """Return a case of ``DOCUMENTS`` over ``ranks`` ranks, with ``more`` padded tokens on each."""
    length = sum(DOCUMENTS)
    layout = balanced_layout(DOCUMENTS, ranks, seq_local=-(-length // ranks) + more, mask=options.get("mask"))
    return Case(layout, ranks=ranks, length=length, **options)


CASES = [
    case_of(4, extents="documents"),
    case_of(8, 2, extents="documents", dtype="float64", sinks=True, poison=True),
    case_of(3, extents="documents", alibi=True, dropout_rate=0.3, key_mask="random"),
    case_of(2, 3, mask=sliding_window(9), softcap=2.0, dtype="bfloat16", v_dim=24),
    case_of(4, mask=causal(), extents="documents", strategy="two_way"),
    case_of(4, extents="documents", strategy=TwoLevel(ranks=2)),
    case_of(4, extents="documents", tiles=None),
    case_of(1, extents="documents"),
]


JOINED_CASES = [
    case_of(4, 2, extents="any", key_mask="random", alibi=True, dropout_rate=0.3, strategy=Ulysses(ranks=2), sinks=True),
    case_of(4, 1, mask=full(), key_extents="tree", strategy="gather"),
    case_of(4, mask=causal(), extents="documents", strategy="ulysses", poison=True),
    case_of(3, 3, mask=sliding_window(9), extents="documents", key_mask="random", strategy="gather"),
    case_of(3, 1, extents="documents", key_mask="random", strategy=Gather(groups=2), sinks=True, dropout_rate=0.3),
    case_of(2, 2, mask=full(), key_extents="tree", strategy=Gather(groups=4), kv_heads=4, dtype="bfloat16"),
]
"""Cases of strategies that join the shards of several ranks."""


def direct_case(ranks: int, more: int = 0, strategy: str = "direct", **options) -> Case:
    """Return a case of "direct" or "auto" whose extents are those of ``DOCUMENTS``, for which the layout was made."""
    case = case_of(ranks, more, extents="documents", strategy=strategy, **options)
    lengths, ends = np.array(DOCUMENTS), np.cumsum(DOCUMENTS)
    own = np.stack([np.repeat(ends - lengths, lengths), np.repeat(ends, lengths)], -1)
    return case.given(extents=np.broadcast_to(own.astype(np.int32), (case.batch, *own.shape)).copy())


def of_unknown_documents(case: Case) -> Case:
    """Return the case with a layout that knows no documents, so that under "direct" the mask alone limits what travels."""
    assert isinstance(case.layout, BalancedLayout)
    return replace(case, layout=replace(case.layout, documents=()))


DIRECT_CASES = [
    direct_case(4),
    direct_case(8, 2, dtype="float64", sinks=True, poison=True),
    direct_case(3, alibi=True, dropout_rate=0.3, key_mask="random"),
    of_unknown_documents(case_of(4, 1, mask=sliding_window(5), extents="documents", key_mask="random", strategy="direct")),
    direct_case(2, 3, mask=sliding_window(9), softcap=2.0, dtype="bfloat16", v_dim=24),
    case_of(4, 1, mask=full(), key_extents="tree", strategy="direct"),
    direct_case(1, 1),
    direct_case(4, mask=sliding_window(0)),
    of_unknown_documents(case_of(3, 2, extents="any", strategy="direct", poison=True)),
    direct_case(4, mask=sliding_window(0, 7), key_mask="shard"),
]
"""Cases of "direct": a single rank, ranks that receive nothing, masks that look ahead, documents that are not known."""

DISORDERED = BalancedLayout((((8, 3), (11, 1), (0, 4)), ((4, 3), (16, 4), (7, 1)), ((20, 4), (12, 4))), 15)
"""A layout whose runs are not in order of position, with padding between and before them."""

APART = BalancedLayout((((4, 4), (0, 4)), ((12, 4), (8, 4))), 16, ((8, 8),))
"""Two documents, each on one rank, with its second half first."""

DISORDERED_CASES = [
    Case(DISORDERED, ranks=3, length=15, key_mask="random", strategy="direct"),
    Case(APART, ranks=2, length=16, batch=1, extents="documents", strategy="direct").given(
        extents=np.repeat([[[0, 8], [8, 16]]], 8, 1).astype(np.int32)
    ),
]
"""Cases of "direct" whose runs are not in order of position: some keys travel, or none."""


def in_balanced_layout(case: Case, more: int) -> Case:
    """Return the case in the layout of its extents' documents, or of random documents, with ``more`` padded tokens on each rank.

    Under "direct" the layout knows its documents only if the extents stay within them.
    """
    rng = np.random.default_rng(case.seed % 2**32)
    if case.extents == "documents" and case.batch:
        first, end = np.moveaxis(case.features["extents"], -1, 0)
        ids = np.where(first < end, first, -1)
    else:
        ids = np.sort(rng.integers(0, 5, (1, case.length)), 1)
    local = -(-case.length // case.ranks) + more
    padding = np.full((len(ids), local * case.ranks - case.length), -1)
    layout = layout_of_ids(np.concatenate([np.zeros_like(ids) if (ids < 0).all() else ids, padding], 1), case.ranks)
    known = case.strategy != "direct" or case.extents in (None, "documents")
    return replace(case, layout=replace(layout, length=case.length, documents=layout.documents if known else ()))


AUTO_CASES = [
    direct_case(8, 2, "auto", dtype="float64", sinks=True, poison=True),
    direct_case(3, 1, "auto", alibi=True, dropout_rate=0.3, key_mask="random"),
    direct_case(4, 0, "auto", mask=sliding_window(0, 7), key_mask="shard"),
    of_unknown_documents(case_of(4, 1, mask=sliding_window(3), extents="any", softcap=2.0)),
    case_of(4, 2, mask=sliding_window(3), dtype="bfloat16"),
]
"""Cases in which "auto" takes "direct" in PyTorch; in JAX too if nothing depends on extents, as in the last two."""


def batch_of_documents() -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Return ids and documents [2, 61], and q, k, v, dout [2, 61, 4 or 2, 8]; the documents of the rows differ, with padding."""
    rng, length = np.random.default_rng(3), sum(DOCUMENTS)
    rows = [np.repeat(np.arange(len(DOCUMENTS)), DOCUMENTS), np.repeat([0, -1, 3, 5, -1], [30, 2, 11, 10, length - 53])]
    ids = rng.integers(0, 99, (2, length))
    return ids, np.stack(rows), [rng.standard_normal((2, length, heads, 8)).astype(np.float32) for heads in (4, 2, 2, 4)]


def check_documents(documents: np.ndarray, arrays: list[np.ndarray], results: list[np.ndarray]) -> None:
    """Assert that out, dq, dk and dv are those of each document alone, and 0 at padding."""
    truth, rounded = ([np.zeros_like(x, np.float64) for x in results] for _ in range(2))
    for row, owner in enumerate(documents):
        for document in np.unique(owner[owner >= 0]):
            of = np.flatnonzero(owner == document)
            q, k, v, dout = (x[row : row + 1, of] for x in arrays)
            given = {"q": q, "k": k, "v": v, "dout": dout, "dlse": np.zeros(q.shape[:3], np.float32)}
            alone = exact(mask=causal(), **given), plain(mask=causal(), dtype="float32", **given)
            for whole, found in zip((truth, rounded), alone, strict=True):
                for x, part in zip(whole, (found.out, found.dq, found.dk, found.dv), strict=True):
                    x[row, of] = part[0]
    for name, mine, x, y in zip(("out", "dq", "dk", "dv"), results, truth, rounded, strict=True):
        assert relative_error(mine, x) <= bound(y, x, "float32"), name
        assert (mine[documents < 0] == 0).all(), name


def tree_case(ranks: int, seed: int, longest: int = 5, **options) -> Case:
    """Return a case of causal attention over two rows of prefix trees, dealt to ``ranks`` ranks.

    ``longest``: the most tokens of a segment.
    """
    rng = np.random.default_rng(seed)
    drawn = [drawn_tree(rng, int(rng.integers(4, 13))) for _ in range(2)]
    parents, lengths = [row for row, _ in drawn], [rng.integers(1, longest + 1, len(row)).tolist() for row, _ in drawn]
    layout = balanced_tree_layout(parents, lengths, ranks)
    case = Case(layout, ranks=ranks, length=layout.length, key_extents="tree", **options)
    return case.given(key_extents=tree_extents(parents, lengths).key_extents)


TREE_CASES = [
    tree_case(3, 1),
    tree_case(4, 2, poison=True, sinks=True, strategy="two_way"),
    tree_case(2, 3, dtype="bfloat16", softcap=2.0, v_dim=24),
    tree_case(1, 4, key_mask="random"),
    tree_case(4, 5, dtype="float64", alibi=True, dropout_rate=0.3, extents="documents"),
    tree_case(2, 6, strategy="gather", tiles=None),
    tree_case(4, 7, strategy=TwoLevel(ranks=2), dtype="float16"),
    tree_case(4, 8, strategy="ulysses"),
    *(tree_case(ranks, 10 + (ranks + turn) % 4) for turn in range(4) for ranks in (1, 2, 3, 4)),
]
"""Random prefix trees in their balanced layout. The first 12: each strategy and feature, and plain trees on 1 to 4 ranks."""

LONG = (300, 17, 1, 500, 130, 64, 200, 90, 411)
"""Tokens of documents that fill several tiles, 1,713 in all."""


def long_case(ranks: int, dim: int, **options) -> Case:
    """Return a case of ``LONG`` over ``ranks`` ranks, with heads of ``dim``."""
    layout = balanced_layout(LONG, ranks, seq_local=-(-sum(LONG) // ranks) + 3, mask=options.get("mask"))
    return Case(layout, ranks=ranks, length=sum(LONG), head_dim=dim, v_dim=dim, **options)


LONG_CASES = [
    long_case(4, 128, extents="documents", dtype="bfloat16"),
    long_case(8, 64, extents="documents", dtype="float16", mask=sliding_window(100), sinks=True),
    long_case(2, 128, mask=full(), key_extents="tree", dtype="bfloat16"),
    long_case(2, 256, extents="documents", key_mask="random", softcap=3.0, dtype="bfloat16"),
    tree_case(4, 15, 400, head_dim=128, v_dim=128, dtype="bfloat16"),
]
"""Cases at sizes of several tiles, for GPUs."""

KERNEL_CASES = [
    case_of(2, 3, extents="documents", poison=True, heads=2, kv_heads=1, batch=1),
    case_of(2, 1, extents="documents", heads=2, kv_heads=1, batch=1, strategy="ulysses", poison=True),
    case_of(3, 1, extents="documents", heads=2, kv_heads=1, batch=1, key_mask="random", strategy="gather"),
    case_of(4, extents="documents", heads=3, kv_heads=1, batch=1, mask=sliding_window(9), softcap=2.0, sinks=True),
    case_of(2, 1, mask=full(), key_extents="tree", key_mask="random", dtype="float16", v_dim=24),
    case_of(4, heads=2, batch=1, strategy="two_way", mask=sliding_window(7, 2)),
    case_of(2, extents="any", key_extents="tree", batch=1, sinks=True),
    case_of(3, 2, extents="documents", heads=2, batch=1, key_mask="random"),
    case_of(4, extents="documents", heads=2, batch=1, strategy=TwoLevel(ranks=2)),
    case_of(4, heads=4, batch=1, key_extents="tree", mask=full(), sinks=True, strategy=Ulysses(ranks=2)),
    case_of(1, extents="documents"),
    tree_case(3, 9, batch=2, heads=2, kv_heads=1),
    direct_case(4, batch=1, heads=2, kv_heads=1, sinks=True),
    direct_case(3, 1, key_mask="random", mask=sliding_window(9), softcap=2.0, dtype="float16", poison=True),
]
"""Cases that kernels run: without ALiBi and dropout."""
