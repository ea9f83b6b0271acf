"""The launches of the kernels that prepare extents and key extents for other kernels (extent_lists.py, backward_sums.py)."""

from __future__ import annotations

from functools import lru_cache

from ...runs import Row
from ..call import RingCall
from ..launch import Array, Launch, Output, Scalar
from ..tile_sizes import MASK_BLOCK, MASK_SPAN, TileConfig, pad_width
from .launches import launch_of

HEADER = 4
INTERVALS = 14
"""HEADER and INTERVALS: a list of ``intervals`` holds HEADER int32 numbers, then at most INTERVALS intervals (first, end)."""


@lru_cache(maxsize=4096)
def extent_bounds(call: RingCall, block_q: int) -> Launch:
    """Return the launch of ``bounds``, int32 [batch, q tiles, 4]: least first, greatest end, greatest first, least end."""
    arguments = {
        "extents_ptr": Array("extents", "int32"),
        "rows_ptr": Array("rows", "int32"),
        "bounds_ptr": Array("bounds", "int32"),
        "S": Scalar(call.seq_local, "i32"),
    }
    constants = {"RUNS": call.q_runs, "ROW": call.k_runs, "LENGTH": Row._fields.index("q_len"), "BLOCK": block_q}
    q_tiles = call.q_tiles(block_q)
    outputs = (Output("bounds", (call.batch, q_tiles, 4), "int32"),)
    return launch_of("extent_bounds", q_tiles * call.batch, arguments, constants, outputs, TileConfig(0, 0, 1, 1))


@lru_cache(maxsize=4096)
def key_tiles(call: RingCall, block_q: int, block_k: int) -> Launch:
    """Return the launch of ``key_tiles``, int32 [batch, q tiles, k_runs, 4]: the ``rows.Tiles`` of keys that a q tile visits."""
    arguments = {
        "rows_ptr": Array("rows", "int32"),
        "extents_ptr": Array("extents", "int32"),
        "key_tiles_ptr": Array("key_tiles", "int32"),
        "S": Scalar(call.seq_local, "i32"),
    }
    constants = {"Q_RUNS": call.q_runs, "K_RUNS": call.k_runs, "BLOCK_Q": block_q, "BLOCK_K": block_k}
    output = Output("key_tiles", (call.batch, call.q_tiles(block_q), call.k_runs, 4), "int32")
    grid = call.batch * call.q_tiles(block_q) * call.k_runs
    return launch_of("key_tiles", grid, arguments, constants, (output,), TileConfig(0, 0, 1, 1))


@lru_cache(maxsize=4096)
def key_bounds(call: RingCall, block_k: int) -> Launch:
    """Return the launch of the ``key_bounds`` of key extents, int32 [batch, k tiles, 4], in the order of ``extent_bounds``."""
    arguments = {
        "extents_ptr": Array("key_extents", "int32"),
        "rows_ptr": Array("rows", "int32"),
        "bounds_ptr": Array("key_bounds", "int32"),
        "S": Scalar(call.kv_local, "i32"),
    }
    constants = {"RUNS": call.k_runs, "ROW": 1, "LENGTH": Row._fields.index("k_len"), "BLOCK": block_k}
    k_tiles = call.k_tiles(block_k)
    outputs = (Output("key_bounds", (call.batch, k_tiles, 4), "int32"),)
    return launch_of("extent_bounds", k_tiles * call.batch, arguments, constants, outputs, TileConfig(0, 0, 1, 1))


@lru_cache(maxsize=4096)
def intervals(call: RingCall, block_q: int, block_k: int, whole: bool) -> Launch:
    """Return the launch of the ``intervals`` of key tiles to visit, int32 [batch, q tiles, k_runs, HEADER + 2 INTERVALS]. It
    holds numbers of tiles, of masked tiles and of intervals, a 0, then first and end (exclusive) of each. ``whole``: tiles that
    need no mask are in separate intervals."""
    arguments = {
        "rows_ptr": Array("rows", "int32"),
        "extents_ptr": call.array("extents", "int32"),
        "key_bounds_ptr": Array("key_bounds", "int32"),
        "intervals_ptr": Array("intervals", "int32"),
        "S": Scalar(call.seq_local, "i32"),
        "T": Scalar(call.kv_local, "i32"),
    }
    constants = {"Q_RUNS": call.q_runs, "K_RUNS": call.k_runs, "BLOCK_Q": block_q, "BLOCK_K": block_k, "WHOLE": whole}
    output = Output("intervals", (call.batch, call.q_tiles(block_q), call.k_runs, HEADER + 2 * INTERVALS), "int32")
    grid = call.batch * call.q_tiles(block_q) * call.k_runs
    return launch_of("intervals", grid, arguments, constants, (output,), TileConfig(0, 0, 1, 1))


@lru_cache(maxsize=4096)
def tile_order(call: RingCall, block_q: int) -> Launch:
    """Return the launch of ``tile_order``, int32 [batch, q tiles]: the query tiles that visit the most key tiles come first."""
    by_keys, q_tiles = "key_extents" in call.array_names, call.q_tiles(block_q)
    arguments = {
        "key_tiles_ptr": None if by_keys else Array("key_tiles", "int32"),
        "intervals_ptr": Array("intervals", "int32") if by_keys else None,
        "tile_order_ptr": Array("tile_order", "int32"),
        "Q_TILES": Scalar(q_tiles, "i32"),
    }
    outputs = (Output("tile_order", (call.batch, q_tiles), "int32"),)
    return launch_of("tile_order", call.batch * q_tiles, arguments, {"K_RUNS": call.k_runs}, outputs, TileConfig(0, 0, 1, 1))


@lru_cache(maxsize=4096)
def key_ranges(call: RingCall) -> Launch:
    """Return the launch of ``key_ranges``, int32 [batch, k_runs, 2, queries]: begin and end (exclusive) of visible keys."""
    arguments = {
        "rows_ptr": Array("rows", "int32"),
        "extents_ptr": Array("extents", "int32"),
        "key_ranges_ptr": Array("key_ranges", "int32"),
        "S": Scalar(call.seq_local, "i32"),
    }
    constants = {"Q_RUNS": call.q_runs, "K_RUNS": call.k_runs, "BLOCK_Q": 128}
    output = Output("key_ranges", (call.batch, call.k_runs, 2, call.seq_local), "int32")
    grid = call.batch * call.q_tiles(128) * call.k_runs
    return launch_of("key_ranges", grid, arguments, constants, (output,), TileConfig(0, 0, 4, 1))


@lru_cache(maxsize=4096)
def query_tiles(call: RingCall, block_q: int, block_k: int) -> Launch:
    """Return the launch of ``query_tiles``, int32 [batch, k tiles, q_runs, 4]: first, last (exclusive), tiles to visit, 0."""
    by_keys = "key_extents" in call.array_names
    arguments = {
        "rows_ptr": Array("rows", "int32"),
        "bounds_ptr": None if by_keys else Array("bounds", "int32"),
        "intervals_ptr": Array("intervals", "int32") if by_keys else None,
        "query_tiles_ptr": Array("query_tiles", "int32"),
        "S": Scalar(call.seq_local, "i32"),
        "T": Scalar(call.kv_local, "i32"),
    }
    constants = {"Q_RUNS": call.q_runs, "K_RUNS": call.k_runs, "BLOCK_Q": block_q, "BLOCK_K": block_k}
    output = Output("query_tiles", (call.batch, call.k_tiles(block_k), call.q_runs, 4), "int32")
    grid = call.batch * call.k_tiles(block_k) * call.q_runs
    return launch_of("query_tiles", grid, arguments, constants, (output,), TileConfig(0, 0, 1, 1))


@lru_cache(maxsize=4096)
def not_finite(call: RingCall, values: bool) -> Launch:
    """Return the launch of ``not_finite``, int32 [batch, kv_heads, spans]: 1 if MASK_SPAN keys hold infinity or NaN."""
    k_stride, v_stride, v_column = call.key_columns
    width = call.v_dim if values else call.head_dim
    arguments = {
        "x_BTGD": Array("kv" if call.packed else "v" if values else "k", call.dtype),
        "not_finite_ptr": Array("not_finite", "int32"),
        "T": Scalar(call.kv_local, "i32"),
        "G": Scalar(call.kv_heads, "i32"),
    }
    constants = {
        "D": width,
        "STRIDE": v_stride if values else k_stride,
        "COLUMN": v_column if values else 0,
        "BLOCK_D": pad_width(width),
    }
    spans = -(-call.kv_local // MASK_BLOCK) * (MASK_BLOCK // MASK_SPAN)
    output = Output("not_finite", (call.batch, call.kv_heads, spans), "int32")
    grid = call.batch * call.kv_heads * spans
    return launch_of("not_finite", grid, arguments, constants, (output,), TileConfig(0, 0, 4, 1))
