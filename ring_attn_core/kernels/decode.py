"""Decoding on GPUs: who computes a call, into how many splits its slots are cut, and with which tiles."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import lru_cache

from ..problem.decode import Decode
from ..records import hashed_once
from .compile import broken_triton
from .tile_sizes import TileConfig, padded, shared_memory

OLDEST_GPU = 80
WIDEST = 256
"""Head sizes that a tile of slots can have."""

BACKENDS = "triton", "blockwise"
"""In the order in which "auto" tries them."""

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
    128 in two bytes are 32 KiB. Triton loads positions one turn of the loop before k and v, which depend on them, so that 6
    stages keep two tiles on their way, 4 one, and 8 three, of one byte.
    """
    block_q = min(MOST_ROWS, max(16, 1 << (rows - 1).bit_length()))
    if dtype == "float32":
        return TileConfig(min(block_q, 32), 32 if width <= 128 else 16, 4, 4)
    stages = (8 if fp8 else 6) if shared_memory(capability) > 128 * 1024 else 4
    return TileConfig(block_q, 64 if width <= 128 else 32, 4, stages)


def residents(call: DecodeCall) -> int:
    """Return how many programs share a multiprocessor: as many as its memory holds the tiles of that are on their way, 4 at most.

    The registers of 108 a thread would do for 4.
    """
    itemsize = 1 if call.fp8 else 4 if call.dtype == "float32" else 2
    tile = call.tiles.block_k * (padded(call.head_dim) + padded(call.v_dim)) * itemsize
    held = tile * max((call.tiles.stages - 1) // 2, 1) + 8 * 1024
    return max(1, min(4, shared_memory(call.capability) // held))


def count_splits(programs: int, tiles: int, at_once: int, least: int) -> int:
    """Return into how many splits of at least ``least`` tiles the slots are cut.

    ``programs``: of a split; ``at_once``: how many a GPU runs at the same time. All programs read equally much at an equal rate,
    so the time is that of the waves in which they run, each as long as its tiles, and 2 more for what begins and ends a program.
    Of equal times the fewest splits are taken, for they are merged afterwards.
    """
    if programs == 0:
        return 1
    most = max(1, min(tiles // max(least, 1), max(at_once // programs, 2)))
    waves = lambda splits: math.ceil(programs * splits / at_once)
    return min(range(1, most + 1), key=lambda splits: (waves(splits) * (math.ceil(tiles / splits) + 2), splits))


def objection(problem: Decode) -> str | None:
    """Return why the kernels cannot compute a problem, in words; None where they can."""
    if not problem.capability:
        return f"its kernels run on NVIDIA GPUs, and these arrays are on {problem.device}"
    if problem.capability < OLDEST_GPU:
        return f"its kernels need a GPU of compute capability 8.0 (sm_80), and this one is sm_{problem.capability}"
    if (broken := broken_triton()) is not None:
        return broken
    if problem.dtypes[0] == "float64":
        return "its kernels take queries of bfloat16, float16 and float32, not float64"
    for name, width in (("head_dim", problem.q_shape[-1]), ("v_dim", problem.v_shape[-1])):
        if width > WIDEST:
            return f"its kernels take head sizes of at most {WIDEST}, and {name} is {width}"
    return None


@lru_cache(maxsize=4096)
def runnable_decode(problem: Decode) -> DecodeCall | None:
    """Return the call of the kernels for a problem that was checked, compiled; None where "blockwise" computes it.

    "auto" takes the kernels where they can, and warns where they do not compile. ValueError for a backend that was asked for by
    name and cannot, and for an unknown name.
    """
    backend = problem.backend
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f'unknown backend {backend!r} for decoding: choose "auto" or one of {", ".join(BACKENDS)}')
    if backend == "blockwise":
        return None
    reason = objection(problem)
    if reason is None:
        from .obstacles import obstacle
        from .portable.launches import of_decode

        call = call_of_decode(problem)
        reason = obstacle(of_decode(call), problem.capability)
        if reason is None:
            return call
        if backend == "auto":
            warnings.warn(f"triton: in decoding {reason}. backend='blockwise' runs this instead, slower", stacklevel=2)
    if backend == "triton":
        raise ValueError(f'backend="triton" cannot decode this: {reason}. backend="blockwise" can')
    return None


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
