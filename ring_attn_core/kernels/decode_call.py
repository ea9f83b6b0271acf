"""Decoding on GPUs: the parameters that all launches of a call share, the number of splits of the cache, and the tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..problem.decode import Decode
from ..records import hash_once
from .tile_sizes import TileConfig, pad_width, shared_memory

NATIVE_FP8 = 89
"""The first compute capability with instructions that convert float8_e4m3fn."""

MIN_SLOTS = 256
"""Least slots (tokens) per split, on average, if a cache is split; with fewer, starting a program takes longer than its loads."""

MAX_ROWS = 64
"""Largest number of rows in a query tile; a row is one query of one query head."""


@hash_once
@dataclass(frozen=True)
class DecodeCall:
    """The parameters that all launches of one decoding call share. ``slots``: tokens per batch row that fit into this rank's
    cache. ``fp8``: k and v have one byte per element. ``tiles_override``, ``splits_override``: other choices to compare."""

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
    array_names: frozenset[str]
    capability: int
    multiprocessors: int
    tiles_override: TileConfig | None = None
    splits_override: int | None = None

    @property
    def rows(self) -> int:
        """Return the number of query rows per kv head: queries times query heads per kv head."""
        return self.queries * (self.heads // self.kv_heads)

    @property
    def tiles(self) -> TileConfig:
        """Return the tiles: ``tiles_override`` if set, else the result of ``decode_tiles``."""
        if self.tiles_override is not None:
            return self.tiles_override
        return decode_tiles(
            self.rows, max(pad_width(self.head_dim), pad_width(self.v_dim)), self.dtype, self.fp8, self.capability
        )

    @property
    def row_tiles(self) -> int:
        """Return the number of tiles that hold the query rows of a kv head."""
        return -(-self.rows // self.tiles.block_q)

    @property
    def splits(self) -> int:
        """Return the number of splits: ``splits_override`` if set, else the result of ``count_splits``."""
        if self.splits_override is not None:
            return self.splits_override
        programs = self.batch * self.kv_heads * self.row_tiles
        at_once = self.multiprocessors * residents(self)
        return count_splits(programs, -(-self.slots // self.tiles.block_k), at_once, MIN_SLOTS // self.tiles.block_k)


def decode_tiles(rows: int, width: int, dtype: str, fp8: bool, capability: int) -> TileConfig:
    """Return the tiles of the kernel ``decode`` for ``rows`` query rows per kv head and heads padded to ``width``.

    A tile has at least 16 rows, the fewest that a matrix product takes. The bytes in flight decide the speed: an H200 reads at
    full speed if each of its 132 multiprocessors has some 50 KB in flight (4.2 TB/s times a latency of 1.5 us, divided by 132). A
    tile of 64 slots, with k and v of 128 two-byte elements each, is 32 KiB. The loads of k and v wait for the load of the tile's
    positions, so Triton divides the stages between positions and keys: 4 stages keep one tile of keys in flight, 6 keep two.

    With 16 rows, an H200 is fastest if a multiprocessor runs four programs with one tile in flight each: 3 % faster than with
    three programs of two tiles each (``benchmarks.decode --part tiles``). In FP8, two warps per program are faster than four by
    a third. With more rows, a multiprocessor has registers for two programs only, so each program needs two tiles in flight, or
    larger tiles.
    """
    block_q = min(MAX_ROWS, max(16, 1 << (rows - 1).bit_length()))
    if dtype == "float32":
        return TileConfig(min(block_q, 32), 32 if width <= 128 else 16, 4, 4)
    large = shared_memory(capability) > 128 * 1024
    if width > 128:
        return TileConfig(block_q, 32, 4, (8 if fp8 else 6) if large else 4)
    if fp8:
        return TileConfig(block_q, 64, 2, 4) if block_q == 16 else TileConfig(block_q, 128 if large else 64, 4, 4)
    return TileConfig(block_q, 64, 4, 6 if large and (block_q > 16 or width < 128) else 4)


def residents(call: DecodeCall) -> int:
    """Return the programs per multiprocessor that shared memory and registers (4 programs with 16 query rows, else 2) allow."""
    itemsize = 1 if call.fp8 else 4 if call.dtype == "float32" else 2
    tile = call.tiles.block_k * (pad_width(call.head_dim) + pad_width(call.v_dim)) * itemsize
    held = tile * max((call.tiles.stages - 1) // 2, 1) + 8 * 1024
    return max(1, min(4 if call.tiles.block_q == 16 else 2, shared_memory(call.capability) // held))


def count_splits(programs: int, tiles: int, at_once: int, least: int) -> int:
    """Return the number of splits with which decoding ``tiles`` key tiles takes the least time; a split has at least ``least``
    tiles. Programs run in waves, which take about 3 us per tile, plus about 10 us, counted as 4 tiles, to start and end. Equal
    times go to the fewest splits, because splits are merged afterwards."""
    if programs == 0:
        return 1
    most = max(1, min(tiles // max(least, 1), 2 * at_once // programs + 1))
    waves = lambda splits: math.ceil(programs * splits / at_once)
    return min(range(1, most + 1), key=lambda splits: (waves(splits) * (math.ceil(tiles / splits) + 4), splits))


def call_of_decode(problem: Decode) -> DecodeCall:
    """Return the parameters that the launches of a decoding problem share."""
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
        array_names=problem.names,
        capability=problem.capability,
        multiprocessors=problem.multiprocessors,
    )
