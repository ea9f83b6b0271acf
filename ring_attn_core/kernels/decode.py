"""Decoding on GPUs: what the launches of a call have in common, into how many splits its slots are cut, and with which tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..problem.decode import Decode
from ..records import hashed_once
from .tile_sizes import TileConfig, padded, shared_memory

NATIVE_FP8 = 89
"""From this compute capability on a GPU converts float8_e4m3fn by itself."""

LEAST_SLOTS = 256
"""A split has at least so many slots: the loads of fewer do not cover the time that starting a program takes."""

MOST_ROWS = 64
"""Rows of a tile of queries at most."""


@hashed_once
@dataclass(frozen=True)
class DecodeCall:
    """What the launches of one call have in common. ``given``: its optional arrays; ``fp8``: keys and values are of one byte."""

    batch: int
    queries: int
    slots: int
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int
    dtype: str
    fp8: bool
    scale: float
    softcap: float | None
    window: int | None
    given: frozenset[str]
    capability: int
    multiprocessors: int
    tiles_asked: TileConfig | None = None
    splits_asked: int | None = None

    @property
    def rows(self) -> int:
        """Return how many rows of queries the keys of a kv head meet."""
        return self.queries * (self.heads // self.kv_heads)

    @property
    def tiles(self) -> TileConfig:
        """Return the tiles: those asked for, to compare, or those of ``decode_tiles``."""
        if self.tiles_asked is not None:
            return self.tiles_asked
        return decode_tiles(self.rows, max(padded(self.head_dim), padded(self.v_dim)), self.dtype, self.fp8, self.capability)

    @property
    def row_tiles(self) -> int:
        """Return how many tiles the rows of a kv head are."""
        return -(-self.rows // self.tiles.block_q)

    @property
    def splits(self) -> int:
        """Return into how many splits the slots are cut: as asked for, or as ``count_splits`` says."""
        if self.splits_asked is not None:
            return self.splits_asked
        programs = self.batch * self.kv_heads * self.row_tiles
        at_once = self.multiprocessors * residents(self)
        return count_splits(programs, -(-self.slots // self.tiles.block_k), at_once, LEAST_SLOTS // self.tiles.block_k)


def decode_tiles(rows: int, width: int, dtype: str, fp8: bool, capability: int) -> TileConfig:
    """Return the tiles of ``decode`` for so many rows and padded heads of ``width``.

    A tile has 16 rows where they suffice, the least that a product takes. What counts is how many bytes are on their way, for a
    GPU must read some 50 KB ahead on every multiprocessor (4.2 TB/s x 1.5 us / 132) to read at full speed: 64 slots of k and v of
    128 in two bytes are 32 KiB. Triton loads positions one turn of the loop before k and v, which depend on them, so that 4
    stages keep one tile on its way, and 6 two. Of those that reach this the fastest on an H200 (``benchmarks.decode --part
    tiles``) are four programs of 16 rows with one tile each, 3 % ahead of three with two. Of one byte, they are faster by a third
    with two warps than with four. More rows leave registers for two programs, which need two tiles each, or larger ones.
    """
    block_q = min(MOST_ROWS, max(16, 1 << (rows - 1).bit_length()))
    if dtype == "float32":
        return TileConfig(min(block_q, 32), 32 if width <= 128 else 16, 4, 4)
    large = shared_memory(capability) > 128 * 1024
    if width > 128:
        return TileConfig(block_q, 32, 4, (8 if fp8 else 6) if large else 4)
    if fp8:
        return TileConfig(block_q, 64, 2, 4) if block_q == 16 else TileConfig(block_q, 128 if large else 64, 4, 4)
    return TileConfig(block_q, 64, 4, 6 if large and (block_q > 16 or width < 128) else 4)


def residents(call: DecodeCall) -> int:
    """Return how many programs share a multiprocessor: as many as its memory holds the tiles of that are on their way, and as its
    registers suffice for: 4 at most, of more than 16 rows 2."""
    itemsize = 1 if call.fp8 else 4 if call.dtype == "float32" else 2
    tile = call.tiles.block_k * (padded(call.head_dim) + padded(call.v_dim)) * itemsize
    held = tile * max((call.tiles.stages - 1) // 2, 1) + 8 * 1024
    return max(1, min(4 if call.tiles.block_q == 16 else 2, shared_memory(call.capability) // held))


def count_splits(programs: int, tiles: int, at_once: int, least: int) -> int:
    """Return into how many splits of at least ``least`` tiles the slots are cut.

    ``programs``: of a split; ``at_once``: how many a GPU runs at the same time. All programs read equally much at an equal rate,
    so the time is that of the waves in which they run, each as long as its tiles, and 4 more for what begins and ends a program,
    some 10 us of 3 a tile. Of equal times the fewest splits are taken, for they are merged afterwards.
    """
    if programs == 0:
        return 1
    most = max(1, min(tiles // max(least, 1), 2 * at_once // programs + 1))
    waves = lambda splits: math.ceil(programs * splits / at_once)
    return min(range(1, most + 1), key=lambda splits: (waves(splits) * (math.ceil(tiles / splits) + 4), splits))


def call_of_decode(problem: Decode) -> DecodeCall:
    """Return what the launches of a problem have in common."""
    (b, n, h, d), (_, t, g, _) = problem.q_shape, problem.k_shape
    return DecodeCall(
        batch=b,
        queries=n,
        slots=t,
        heads=h,
        kv_heads=g,
        head_dim=d,
        v_dim=problem.v_shape[-1],
        dtype=problem.dtypes[0],
        fp8=problem.fp8,
        scale=problem.factor,
        softcap=None if problem.softcap is None else float(problem.softcap),
        window=problem.window,
        given=problem.names,
        capability=problem.capability,
        multiprocessors=problem.multiprocessors,
    )
