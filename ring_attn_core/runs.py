"""Runs and bands: the two shapes everything else is made of.

A *run* is an arithmetic progression of token positions. A *band* is a mask that depends only on the lag
``q_pos - k_pos``. Between two runs of equal stride a band stays a band in local indices, which is why no
kernel has to know a layout.
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
        """The part of this run whose positions are below ``end``."""
        visible = -(-(end - self.start) // self.stride)
        return Run(self.start, min(max(visible, 0), self.length), self.stride)


@dataclass(frozen=True, slots=True)
class Band:
    """The mask ``lo <= q_pos - k_pos <= hi``; ``None`` leaves that side open.

    Make one with :func:`~ring_attn_core.masks.full`, :func:`~ring_attn_core.masks.causal` or
    :func:`~ring_attn_core.masks.sliding_window`.
    """

    lo: int | None = None
    hi: int | None = None

    def sees(self, q_pos: int, k_pos: int) -> bool:
        lag = q_pos - k_pos
        return (self.lo is None or lag >= self.lo) and (self.hi is None or lag <= self.hi)

    def onto(self, q: Run, k: Run) -> Band:
        """This band in local indices: which ``i - j`` query ``i`` of run ``q`` and key ``j`` of run ``k`` may have.

        With ``d = q.start - k.start`` and the common stride ``s``: ``ceil((lo - d) / s) <= i - j <= floor((hi - d) / s)``.
        """
        if q.stride != k.stride:
            raise ValueError(f"a band between runs needs equal strides, got {q.stride} for queries and {k.stride} for keys")
        d = q.start - k.start
        lo = None if self.lo is None else -((d - self.lo) // q.stride)
        hi = None if self.hi is None else (self.hi - d) // q.stride
        return Band(lo, hi)

    def within(self, window: int) -> Band:
        """The part of this band whose lags are at most ``window`` tokens, in either direction; it may be empty (lo > hi)."""
        lo = -window if self.lo is None else max(self.lo, -window)
        hi = window if self.hi is None else min(self.hi, window)
        return Band(lo, hi)

    def clamped(self, farthest: int) -> Band:
        """This band with no side beyond ``farthest``, which no lag is: the same mask, in integers that fit int32."""
        side = lambda x: None if x is None else min(max(x, -farthest), farthest)
        return Band(side(self.lo), side(self.hi))

    def area(self, queries: int, keys: int) -> int:
        """How many pairs ``(i, j)`` with ``i < queries`` and ``j < keys`` this band lets through."""
        above = queries * keys if self.hi is None else _pairs_up_to(self.hi, queries, keys)
        below = 0 if self.lo is None else _pairs_up_to(self.lo - 1, queries, keys)
        return max(above - below, 0)

    def __str__(self) -> str:
        lo = "" if self.lo is None else f"{self.lo} <= "
        hi = "" if self.hi is None else f" <= {self.hi}"
        return f"{lo}q_pos - k_pos{hi}" if lo or hi else "every key"


def _pairs_up_to(lag: int, queries: int, keys: int) -> int:
    """Pairs with ``i - j <= lag``: rows up to ``lag`` see all keys, each later row one key fewer."""
    whole = min(max(lag + 1, 0), queries)
    first = max(lag + 1, 0)
    last = min(queries, lag + keys)
    partial = max(last - first, 0)
    most = keys - (first - lag)
    return whole * keys + partial * most - partial * (partial - 1) // 2


class Row(NamedTuple):
    """What a kernel reads about one pair of runs; each field an int, or an array of any framework.

    ``lo``, ``hi``: the band in local indices ``i - j``, clamped to the slots (``lo > hi``: nothing to see).
    ``q_base``, ``q_len``, ``q_start``: where the query run begins in its shard, how many of its tokens are no padding,
    the position of its first; ``k_base``, ``k_len``, ``k_start`` likewise. ``stride``: step in positions of both.
    ``shard``: which of the shards that the given k/v array holds; 0 where it holds one.
    """

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
    """The :class:`Row` of two runs ``(base, length, start, stride)``.

    Plain arithmetic, so the four numbers of a run may be Python ints or arrays that broadcast (numpy, jnp, torch):
    in JAX the rank, and with it every field, is traced.
    """
    q_base, q_len, q_start, stride = q_run
    k_base, k_len, k_start, _ = k_run
    d = q_start - k_start
    nothing = d * 0
    lo = nothing - k_slot if band.lo is None else clamp(-((d - band.lo) // stride), -k_slot, q_slot)
    hi = nothing + q_slot if band.hi is None else clamp((band.hi - d) // stride, -k_slot, q_slot)
    return Row(lo, hi, q_base, q_len, q_start, k_base, k_len, k_start, stride, shard)


def clamp(x: Any, low: int, high: int) -> Any:
    """``min(max(x, low), high)`` in operators that ints and arrays share."""
    x = x + only_where(x < low, low - x)
    return x + only_where(x > high, high - x)


def only_where(condition: Any, x: Any) -> Any:
    """``x`` where ``condition`` is true, else 0, of ints and arrays: JAX's strict promotion multiplies no bool by an integer."""
    return x * (condition.astype(x.dtype) if hasattr(condition, "astype") and hasattr(x, "dtype") else condition)
