"""Runs (token positions), bands (masks) and rows (integers for kernels).

A *run* is an arithmetic progression of token positions of a rank. A *band* is a mask that depends only on the lag
``q_pos - k_pos``. A *row* describes two runs and their band to a kernel. Between two runs of equal stride, a band of positions is
also a band of local indices (indices in the runs). Therefore kernels do not depend on the layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Run:
    """Token positions ``start, start + stride, ..., start + stride * (length - 1)``."""

    start: int
    length: int
    stride: int = 1

    def positions(self) -> range:
        return range(self.start, self.start + self.stride * self.length, self.stride)

    def before(self, end: int) -> Run:
        """Return the part of this run at positions below ``end``."""
        visible = -(-(end - self.start) // self.stride)
        return Run(self.start, min(max(visible, 0), self.length), self.stride)


@dataclass(frozen=True, slots=True)
class Band:
    """The mask ``lo <= q_pos - k_pos <= hi``; ``None`` means no limit on that side.

    Make one with :func:`~ring_attn_core.masks.full`, :func:`~ring_attn_core.masks.causal` or
    :func:`~ring_attn_core.masks.sliding_window`.
    """

    lo: int | None = None
    hi: int | None = None

    def sees(self, q_pos: int, k_pos: int) -> bool:
        lag = q_pos - k_pos
        return (self.lo is None or lag >= self.lo) and (self.hi is None or lag <= self.hi)

    def onto(self, q: Run, k: Run) -> Band:
        """Return this band between local indices: query ``i`` of run ``q`` and key ``j`` of run ``k``.

        With ``d = q.start - k.start`` and the common stride ``s``: ``ceil((lo - d) / s) <= i - j <= floor((hi - d) / s)``.
        Raise ValueError if the strides differ.
        """
        if q.stride != k.stride:
            raise ValueError(f"a band between runs needs equal strides, got {q.stride} for queries and {k.stride} for keys")
        d = q.start - k.start
        lo = None if self.lo is None else -((d - self.lo) // q.stride)
        hi = None if self.hi is None else (self.hi - d) // q.stride
        return Band(lo, hi)

    def within(self, window: int) -> Band:
        """Return the intersection of this band with the lags from ``-window`` to ``window``. It may be empty (lo > hi)."""
        lo = -window if self.lo is None else max(self.lo, -window)
        hi = window if self.hi is None else min(self.hi, window)
        return Band(lo, hi)

    def clamped(self, farthest: int) -> Band:
        """Return the same mask with ``lo`` and ``hi`` clamped to ``-farthest`` .. ``farthest``, so that they fit int32.

        The absolute value of every lag must be below ``farthest``.
        """
        side = lambda x: None if x is None else min(max(x, -farthest), farthest)
        return Band(side(self.lo), side(self.hi))

    def area(self, queries: int, keys: int) -> int:
        """Return the number of visible pairs ``(i, j)`` with ``i < queries`` and ``j < keys``."""
        above = queries * keys if self.hi is None else _pairs_up_to(self.hi, queries, keys)
        below = 0 if self.lo is None else _pairs_up_to(self.lo - 1, queries, keys)
        return max(above - below, 0)

    def __str__(self) -> str:
        lo = "" if self.lo is None else f"{self.lo} <= "
        hi = "" if self.hi is None else f" <= {self.hi}"
        return f"{lo}q_pos - k_pos{hi}" if lo or hi else "every key"


def _pairs_up_to(lag: int, queries: int, keys: int) -> int:
    """Return the number of pairs ``(i, j)``, ``i < queries`` and ``j < keys``, with ``i - j <= lag``."""
    whole = min(max(lag + 1, 0), queries)
    first = max(lag + 1, 0)
    last = min(queries, lag + keys)
    partial = max(last - first, 0)
    most = keys - (first - lag)
    return whole * keys + partial * most - partial * (partial - 1) // 2


class Row(NamedTuple):
    """The integers, or arrays of them, that a kernel reads for one (query run, key run) pair. ``lo``, ``hi``: the band ``lo <= i
    - j <= hi`` of local indices, empty if ``lo > hi``. A run has its offset ``base`` in the shard, tokens ``len`` without
    padding, and first position ``start``. ``stride``: of both runs. ``shard``: index of the shard in k/v."""

    lo: Any
    hi: Any
    q_base: Any
    q_len: Any
    q_start: Any
    k_base: Any
    k_len: Any
    k_start: Any
    stride: Any
    shard: Any


def row(q_run: Any, k_run: Any, band: Band, q_slot: int, k_slot: int, shard: int = 0) -> Row:
    """Return the :class:`Row` of two runs ``(base, length, start, stride)``, of ints or arrays that broadcast, traced in JAX. The
    band is clamped to ``-k_slot .. q_slot``, the lengths of the runs with padding."""
    q_base, q_len, q_start, stride = q_run
    k_base, k_len, k_start, _ = k_run
    d = q_start - k_start
    nothing = d * 0
    lo = nothing - k_slot if band.lo is None else clamp(-((d - band.lo) // stride), -k_slot, q_slot)
    hi = nothing + q_slot if band.hi is None else clamp((band.hi - d) // stride, -k_slot, q_slot)
    return Row(lo, hi, q_base, q_len, q_start, k_base, k_len, k_start, stride, shard)


def clamp(x: Any, low: int, high: int) -> Any:
    """Return ``min(max(x, low), high)``, computed by operators that work on ints and on arrays."""
    x = x + only_where(x < low, low - x)
    return x + only_where(x > high, high - x)


def only_where(condition: Any, x: Any) -> Any:
    """Return ``x`` where ``condition`` is true, else 0. A bool array of NumPy or JAX is cast to ``x.dtype`` first, because JAX's
    strict promotion refuses bool times integer."""
    return x * (condition.astype(x.dtype) if hasattr(condition, "astype") and hasattr(x, "dtype") else condition)
