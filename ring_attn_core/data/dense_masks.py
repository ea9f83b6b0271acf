"""Conversion of a dense mask, bool [rows, queries, keys], to a band, extents, key extents and a key mask.

Extents hold an interval of keys for each query, key extents an interval of queries for each key. ``dense_mask_arguments`` serves
``functional/`` of both packages, and the layers of PyTorch; in JAX masks of layers go through ``layers/dense_mask.py``.

With 5 tokens (rows are queries, columns keys, # is visible):

    a band       rows are intervals       columns are intervals       neither: refused
    (causal)     (documents)              (a prefix tree)             (a hole)
    #....        ##...                    #....                       #....
    ##...        ##...                    ##...                       ##...
    ###..        ..###                    #.#..                       #.#..
    ####.        ..###                    #.##.                       ##.#.
    #####        ..###                    #...#                       #...#

The *hull* of a query is the tightest interval around the keys that it sees; the hull of a key is the tightest interval around
the queries that see it. A hull around no keys or queries is empty. If a mask is an intersection of such intervals at all, then
it is the intersection of its hulls. So no other intervals are tried.

``Hulls.parts`` tries six candidates in this order: a band; extents; a band with a key mask; extents with a key mask; key extents;
extents with key extents. A band is limited by the least lag (query - key) of the visible pairs, by the greatest, by both or by
neither. Each candidate permits all visible pairs, so it equals the mask if both permit equally many pairs. numpy is imported on
first use.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ..lazy_numpy import np
from ..masks import full
from ..runs import Band

BLOCK = 2**24
"""Largest number of (query, key) pairs of a block of several queries. A block of one query may have more pairs."""

NEITHER = (
    "is neither a band (causal, a sliding window) nor an intersection of one interval of keys for each query and one interval of "
    "queries for each key: split it into such masks, and merge the results of ring_attention with return_lse=True"
)
"""The end of the error about a mask that no arguments of ``ring_attention`` express."""

HEADS_DIFFER = "differs between heads, which share what they see: pass the same for all heads of a batch row"
"""The end of the error about a mask that is not the same for all heads."""


class DenseMaskArguments(NamedTuple):
    """A mask as arguments of ``ring_attention``, before sharding. A query sees the keys that all of these arguments permit."""

    band: Band
    extents: Any = None
    """int32 [rows, queries, 2]: first and end (exclusive) of the keys that each query may see; None: no limit."""
    key_extents: Any = None
    """int32 [rows, keys, 2]: first and end (exclusive) of the queries that may see each key; None: no limit."""
    key_mask: Any = None
    """bool [rows, keys]: False for a key that no query sees; None: True for all keys."""


class Hulls:
    """The hulls of a dense mask that is read in blocks of queries.

    ``extents``: int32 [rows, queries, 2], the tightest interval around the keys that each query sees; [0, 0) if it sees none.
    ``key_extents``: int32 [rows, keys, 2], the tightest interval around the queries that see each key; [0, 0) if none sees it.
    ``counts``: int64 [rows, queries], the number of keys that each query sees.
    """

    bands_first = False
    """True to try a band with a key mask before extents."""

    def __init__(self, rows: int, queries: int, keys: int) -> None:
        self.extents, self.key_extents = np.zeros((rows, queries, 2), np.int32), np.zeros((rows, keys, 2), np.int32)
        self.counts = np.zeros((rows, queries), np.int64)

    def add(self, start: int, visible: Any) -> None:
        """Add the queries from ``start`` on, in ascending order. ``visible``: bool [rows, queries of the block, keys]."""
        some = slice(start, start + visible.shape[1])
        self.counts[:, some] = visible.sum(2)
        self.extents[:, some] = _hull(visible)
        below, seen = _hull(visible.swapaxes(1, 2)) + start, visible.any(1)
        new = seen & (self.key_extents[..., 1] == 0)
        self.key_extents[..., 0] = np.where(new, below[..., 0], self.key_extents[..., 0])
        self.key_extents[..., 1] = np.where(seen, below[..., 1], self.key_extents[..., 1])

    def parts(self) -> DenseMaskArguments | None:
        """Return the arguments that express the mask, a band if possible; None if it is not the intersection of its hulls."""
        seen = self.key_extents[..., 1] > 0
        everybody = np.ones_like(seen)
        if (band := self._band(everybody)) is not None:
            return DenseMaskArguments(band)
        by_rows = self._fits(everybody, *np.moveaxis(self.extents, 2, 0))
        if (self.bands_first or not by_rows) and (band := self._band(seen)) is not None:
            return DenseMaskArguments(band, key_mask=seen)
        if by_rows or self._fits(seen, *np.moveaxis(self.extents, 2, 0)):
            return DenseMaskArguments(full(), self.extents, key_mask=None if by_rows else seen)
        columns, both = self._fitting_columns()
        if columns:
            return DenseMaskArguments(full(), key_extents=self.key_extents)
        return DenseMaskArguments(full(), self.extents, self.key_extents) if both else None

    def _band(self, key_mask: Any) -> Band | None:
        """Return the band of fewest limits that equals the mask if combined with ``key_mask``, bool [rows, keys]; else None."""
        seeing, row = self.counts > 0, np.arange(self.counts.shape[1])
        if not seeing.any():
            return full() if not key_mask.any() or not row.size else None
        lo = int((row - self.extents[..., 1] + 1)[seeing].min())
        hi = int((row - self.extents[..., 0])[seeing].max())
        keys = key_mask.shape[1]
        for band in (Band(), Band(lo=lo), Band(hi=hi), Band(lo, hi)):
            first = row * 0 if band.hi is None else np.clip(row - band.hi, 0, keys)
            end = row * 0 + keys if band.lo is None else np.clip(row - band.lo + 1, 0, keys)
            if self._fits(key_mask, first, np.maximum(first, end)):
                return band
        return None

    def _fits(self, key_mask: Any, first: Any, end: Any) -> bool:
        """Return whether each query sees all permitted keys in its interval ``first .. end - 1``, int [rows, queries] or
        [queries]. The interval contains all keys that a query sees, so the number of permitted keys is compared with
        ``counts``."""
        before = np.pad(np.cumsum(key_mask, 1, dtype=np.int64), ((0, 0), (1, 0)))
        first, end = (np.broadcast_to(x, self.counts.shape) for x in (first, end))
        between = np.take_along_axis(before, end, 1) - np.take_along_axis(before, first, 1)
        return bool((between == self.counts).all())

    def _fitting_columns(self) -> tuple[bool, bool]:
        """Return whether the keys' hulls alone equal the mask, and whether their intersection with the queries' hulls does."""
        _, queries, _ = self.extents.shape
        keys = self.key_extents.shape[1]
        first, end = np.moveaxis(self.key_extents[:, None], 3, 0)
        alone = both = True
        for some in _blocks(queries, self.key_extents.shape[0] * keys):
            query, key = np.arange(some.start, some.stop)[:, None], np.arange(keys)
            columns = (first <= query) & (query < end)
            alone = alone and bool((columns.sum(2) == self.counts[:, some]).all())
            rows = (self.extents[:, some, :1] <= key) & (key < self.extents[:, some, 1:])
            both = both and bool(((columns & rows).sum(2) == self.counts[:, some]).all())
            if not both:
                break
        return alone, both


def dense_mask_arguments(visible: Any, bands_first: bool = False) -> DenseMaskArguments | None:
    """Convert a numpy mask, bool [rows, queries, keys], to arguments of ``ring_attention``; None if no arguments express it."""
    hulls = Hulls(*visible.shape)
    for some in _blocks(visible.shape[1], visible.shape[0] * visible.shape[2]):
        hulls.add(some.start, visible[:, some])
    hulls.bands_first = bands_first
    return hulls.parts()


def _blocks(queries: int, pairs: int) -> Iterable[slice]:
    """Return slices of ``queries``, of at most BLOCK pairs or else one query. ``pairs``: those of one query in all rows."""
    step = max(BLOCK // max(pairs, 1), 1)
    return (slice(start, min(start + step, queries)) for start in range(0, queries, step))


def _hull(visible: Any) -> Any:
    """Return the tightest interval around the True entries of the last dimension, int32 [..., 2]; [0, 0) if all are False."""
    if not visible.shape[-1]:
        return np.zeros((*visible.shape[:-1], 2), np.int32)
    first, end = visible.argmax(-1), visible.shape[-1] - visible[..., ::-1].argmax(-1)
    hull = np.stack([first, end], -1).astype(np.int32)
    return np.where(visible.any(-1)[..., None], hull, 0)


def both(a: Band, b: Band) -> Band:
    pick = lambda choose, x, y: y if x is None else x if y is None else choose(x, y)
    return Band(pick(max, a.lo, b.lo), pick(min, a.hi, b.hi))
