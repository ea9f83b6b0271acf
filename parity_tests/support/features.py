"""Random arrays of attention's features beyond its mask: extents, key masks, sinks, slopes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Rng = np.random.Generator


def documents(rng: Rng, queries: int, keys: int) -> np.ndarray:
    """Draw packed documents of random lengths, some of one token; in half of the draws the last one is fully masked padding."""
    n = max(queries, keys, 1)
    ends = np.union1d(rng.integers(1, n + 1, n // 8), [n])
    starts = np.concatenate([[0], ends[:-1]])
    spans = np.stack([starts, ends], -1)
    if rng.random() < 0.5:
        spans[-1] = 0
    return spans[np.searchsorted(ends, np.arange(queries), "right")]


def prefix(rng: Rng, queries: int, keys: int) -> np.ndarray:
    """Draw a prefix-LM: all queries see the prefix, and the rest is causal."""
    ends = np.maximum(rng.integers(0, keys + 1), np.arange(queries) + 1)
    return np.stack([np.zeros_like(ends), ends], -1)


def padding(rng: Rng, queries: int, keys: int) -> np.ndarray:
    """Draw padding on the left and on the right, fully masked as queries and as keys."""
    first, end = np.sort(rng.integers(0, keys + 1, 2))
    token = (np.arange(queries) >= first) & (np.arange(queries) < end)
    return np.stack([np.full(queries, first), np.where(token, end, first)], -1)


def anything(rng: Rng, queries: int, keys: int) -> np.ndarray:
    """Draw any interval for each query; a quarter are empty."""
    spans = np.sort(rng.integers(0, keys + 1, (queries, 2)))
    return np.where(rng.random((queries, 1)) < 0.25, spans[:, :1], spans)


EXTENTS: dict[str, Callable[[Rng, int, int], np.ndarray]] = {
    "documents": documents,
    "prefix": prefix,
    "padding": padding,
    "any": anything,
}
"""Functions (rng, queries, keys) that draw the extents of a batch row: [queries, 2], first and end (exclusive) key position."""


def tree(rng: Rng, keys: int, queries: int) -> np.ndarray:
    """Draw a prefix tree in depth-first order: a key is visible to queries from itself to the end of its segment's subtree."""
    ends = np.union1d(rng.integers(1, max(keys, 2), max(keys // 7, 1)), [keys])
    starts, depth = np.concatenate([[0], ends[:-1]]), [0]
    for _ in starts[1:]:
        depth.append(int(rng.integers(1, depth[-1] + 2)))
    last = [next((ends[m - 1] for m in range(n + 1, len(depth)) if depth[m] <= depth[n]), keys) for n in range(len(depth))]
    segment = np.searchsorted(ends, np.arange(keys), "right")
    return np.stack([np.arange(keys), np.array(last)[segment]], -1)


KEY_EXTENTS: dict[str, Callable[[Rng, int, int], np.ndarray]] = {"tree": tree, "any": anything}
"""Functions (rng, keys, queries) that draw a batch row's key extents: [keys, 2], first and end (exclusive) query position."""

KEY_MASKS = ("random", "shard", "none", "ends")
"""Names of key masks. ``random``: three keys of five are visible. ``shard``: a rank's whole shard is masked (on one rank: in one
batch row), and a few more. ``none``: a batch row without keys. ``ends``: a fifth is masked at either end."""


def extents(name: str, rng: Rng, batch: int, queries: int, keys: int) -> np.ndarray:
    """Draw extents, int32 [batch, queries, 2], within the keys."""
    rows = [EXTENTS[name](rng, queries, keys) for _ in range(batch)]
    return np.clip(np.reshape(rows, (batch, queries, 2)), 0, keys).astype(np.int32)


def key_extents(name: str, rng: Rng, batch: int, keys: int, queries: int) -> np.ndarray:
    """Draw key extents, int32 [batch, keys, 2], within the queries."""
    rows = [KEY_EXTENTS[name](rng, keys, queries) for _ in range(batch)]
    return np.clip(np.reshape(rows, (batch, keys, 2)), 0, queries).astype(np.int32)


def key_mask(name: str, rng: Rng, batch: int, keys: int, shard: np.ndarray) -> np.ndarray:
    """Draw a key mask, bool [batch, keys]; ``shard``: bool [keys], the positions of one rank."""
    mask = rng.random((batch, keys)) < (0.9 if name == "shard" else 0.6)
    if name == "shard":
        mask[: 1 if shard.all() else batch, shard] = False
    if name == "none":
        mask[:1] = False
    if name == "ends":
        place = np.arange(keys)
        mask[:] = (place >= keys // 5) & (place < keys - keys // 5)
    return mask


def sinks(rng: Rng, heads: int) -> np.ndarray:
    return rng.standard_normal(heads)


def alibi_slopes(rng: Rng, heads: int) -> np.ndarray:
    """Draw slopes of both signs, which favour near or far keys."""
    return rng.uniform(-0.05, 0.2, heads)
