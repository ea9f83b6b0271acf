"""Pure functions that return the launches of the Hopper forward and of the one-pass backward (``tile_sizes.hopper_passes``)."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ..call import RingCall
from ..launch import Argument, Array, Descriptor, Launch, Output, Scalar
from ..tile_sizes import HOPPER_BACKWARD_KEYS, HopperConfig, hopper_tiles
from .supports import TileColumns, columns, in_parts

L2_SHARE = 8 * 2**20
"""Bound of the bytes of k and v processed at a time, so that they stay in the L2 cache. A single key head may exceed it.

TFLOP/s on one H200, causal, by this bound; in the first column with one key head at a time:

    tokens       heads          one head    8 MiB   16 MiB   32 MiB   64 MiB
    16,384       32/8 of 128         627      630      627      623      625
    16,384       32/32 of 64         439      444      441      432      424
    4 x 4,096    16/16 of 128        513      535      530      537      528
"""


PROGRAMS = 132
"""Largest number of programs of a forward or a pass of dq: one for each multiprocessor of an H100 SXM or an H200.

If a GPU has fewer multiprocessors, or other kernels occupy some, programs that start late may find no tile left. They then end.
"""


KV_HEADS_TOGETHER = 8
"""Upper bound of the number of key heads that the backward processes at a time; see ``KEY_TILES_TOGETHER``."""
KEY_TILES_TOGETHER = 1024
"""The backward processes just enough key heads at a time to have this many key tiles of 128 keys, if KV_HEADS_TOGETHER allows.

Programs that run at the same time then read the same queries from the L2 cache. In a longer sequence the programs of a head
drift further apart, so fewer heads fit.

TFLOP/s of the backward on one H200, causal, by the number of heads processed at a time:

    tokens       heads             1      2      4      8     16    all
    16,384       16/16 of 128           549    552    545
    16,384       32/8                   461    515    537
    16,384       32/32 of 64            419    431    442
    32,768       of 128          561    563    558    543
    131,072      of 128          573    575    570    552
    1,048,576    of 128          576    565    488
    4 x 4,096                                  442    443    438    377
"""


def forward(call: RingCall, portable: Launch) -> Launch:
    """Return the launch of the Hopper forward, with the outputs of ``portable``, the launch of the portable forward."""
    d, e = _widths(call)
    tiles = tiles_of_forward(call)
    constant = dict(portable.constants)
    constants = {
        **{name: constant[name] for name in ("E", "V_COLUMN", "Q_RUNS", "K_RUNS")},
        **{name: constant[name] for name in ("FIRST", "LAST", "FOLDED", "ZERO_MASKED", "ALIGNED")},
        "BLOCK_Q": tiles.block_q,
        "BLOCK_K": tiles.block_k,
        "BLOCK_D": d.main,
        "TAIL_D": d.tail,
        "BLOCK_E": e,
        "STAGES": tiles.stages,
        "Q_IN_REGISTERS": tiles.q_in_registers,
        "REGISTERS": tiles.registers,
        "PRODUCER_REGISTERS": tiles.producer_registers,
    }
    total = call.q_tiles(tiles.block_q) * call.heads * call.batch
    arguments = _descriptors(call, tiles, d, e)
    for parameter, argument in portable.arguments:
        if parameter == "out_BSHE":
            arguments |= extent_lists(call, "key_tiles", "intervals", "tile_order", "not_finite") | {
                "tickets_in_ptr": Array("tickets_in", "int32")
            }
        if parameter not in ("q_tail_BSHD", "k_tail_BTGD"):  # its own tails have other columns
            arguments.setdefault(parameter, argument)
        if parameter == "lse_BSH":
            arguments["tickets_ptr"] = Array("tickets", "int32")
    arguments |= {"together": Scalar(heads_together(call), "i32"), "total": Scalar(total, "i32"), **call.head_counts}
    return replace(
        portable,
        kernel="hopper_forward",
        grid=min(total, PROGRAMS),
        arguments=tuple(arguments.items()),
        constants=tuple(constants.items()),
        warps=4,
        stages=1,
        scratch=(Output("tickets", (1,), "int32", over="tickets_in"),),
    )


def tiles_of_forward(call: RingCall) -> HopperConfig:
    """Return the tile sizes, stages and registers of the Hopper forward."""
    d, e = _widths(call)
    return hopper_tiles(d.total, e, call.features)


def _widths(call: RingCall) -> tuple[TileColumns, int]:
    """Return the padded columns of q and k, as main and tail (empty if v has more than 128), and those of v."""
    e = columns(call.v_dim)
    return in_parts(call.head_dim) if e <= 128 else TileColumns(columns(call.head_dim), 0), e


def extent_lists(call: RingCall, *names: str) -> dict[str, Argument]:
    """Map kernel parameters to the arrays ``names`` that extents need; key extents need ``intervals``, not ``key_tiles``."""
    left_out = "key_tiles" if "key_extents" in call.array_names else "intervals"
    return {f"{name}_ptr": Array(name, "int32") for name in names if call.by_extents and name != left_out}


def _descriptors(call: RingCall, tiles: HopperConfig, d: TileColumns, e: int) -> dict[str, Argument]:
    pitch, v_width, _ = call.key_columns
    k_name, v_name = ("kv", "kv") if call.packed else ("k", "v")
    q_shape = call.batch, call.seq_local, call.heads, call.head_dim
    k_shape = call.batch, call.kv_local, call.kv_heads, call.head_dim
    return {
        **parts("q", "BSHD", "q", call.dtype, q_shape, 64, d),
        **parts("k", "BTGD", k_name, call.dtype, k_shape, tiles.block_k, d, pitch),
        "v_BTGE": Descriptor(v_name, call.dtype, (*k_shape[:3], v_width), (1, tiles.block_k, 1, e), gluon=True),
    }


def parts(
    tensor: str, axes: str, name: str, dtype: str, shape: tuple[int, ...], rows: int, columns_of: TileColumns, pitch: int = 0
) -> dict[str, Argument]:
    """Map kernel parameters (``q_BSHD``, ``q_tail_BSHD``) to TMA descriptors of the main columns and, if any, the tail."""
    made: dict[str, Argument] = {}
    for part, width in (("", columns_of.main), ("_tail", columns_of.tail)):
        if width:
            made[f"{tensor}{part}_{axes}"] = Descriptor(name, dtype, shape, (1, rows, 1, width), pitch, gluon=True)
    return made


def heads_together(call: RingCall) -> int:
    """Return how many query heads to process at a time: those of one key head, or of more if their k and v fit L2_SHARE."""
    bytes_of_head = 2 * call.kv_local * (call.head_dim + call.v_dim)
    kv_heads = max(L2_SHARE // bytes_of_head, 1)
    return min(kv_heads * (call.heads // call.kv_heads), call.batch * call.heads)


SUM_ROWS = 32
SUM_COLUMNS = 256
"""SUM_ROWS and SUM_COLUMNS: shape of the float32 dq sums of one query tile; one TMA operation adds to all of them."""
TURN_SPACING = 8
"""Distance, in 32-bit words, of the turn counters of consecutive query tiles (``sums_of_dq``)."""


@lru_cache(maxsize=4096)
def sums_of_dq(call: RingCall) -> tuple[int, int]:
    """Return the shape (rows, SUM_COLUMNS) of all query tiles' dq sums and turn counters, which must start at 0."""
    tiles = call.batch * call.heads * call.q_tiles(queries(call))
    return tiles * SUM_ROWS + -(-tiles * TURN_SPACING // SUM_COLUMNS), SUM_COLUMNS


def queries(call: RingCall) -> int:
    """Return the number of queries per tile of the one-pass backward."""
    return 64 if columns(call.head_dim) == 128 else 128


@lru_cache(maxsize=4096)
def backward(call: RingCall, last: bool) -> Launch:
    """Return the launch of a one-pass backward step. Its outputs are ``dq`` (float32 ``sums_of_dq``, over ``dq_in``), then
    ``dkv`` or ``dk`` and ``dv`` of this step only, because earlier gradients travel meanwhile. ``last``: dk and dv get the
    input's dtype."""
    together, width, block_q = call.head_dim + call.v_dim, columns(call.head_dim), queries(call)
    dtype = call.dtype if last else "float32"
    shape = call.batch, call.kv_local, call.kv_heads
    if call.packed:
        gradients: tuple[Output, ...] = (Output("dkv", (*shape, together), dtype),)
    else:
        gradients = Output("dk", (*shape, call.head_dim), dtype), Output("dv", (*shape, call.v_dim), dtype)

    def tile(name: str, tokens: int, heads: int, columns_of: int, pitch: int, rows: int) -> Descriptor:
        return Descriptor(name, call.dtype, (call.batch, tokens, heads, columns_of), (1, rows, 1, width), pitch, gluon=True)

    key_pitch, value_pitch = (together, together) if call.packed else (call.head_dim, call.v_dim)
    keys, values = ("kv", "kv") if call.packed else ("k", "v")
    arguments: dict[str, Argument | None] = {
        "q_BSHD": tile("q", call.seq_local, call.heads, call.head_dim, call.head_dim, block_q),
        "dout_BSHE": tile("dout", call.seq_local, call.heads, call.v_dim, call.v_dim, block_q),
        "k_BTGD": tile(keys, call.kv_local, call.kv_heads, call.head_dim, key_pitch, HOPPER_BACKWARD_KEYS),
        "v_BTGE": tile(values, call.kv_local, call.kv_heads, value_pitch, value_pitch, HOPPER_BACKWARD_KEYS),
        "dq_in_RX": Descriptor("dq_in", "float32", sums_of_dq(call), (SUM_ROWS, SUM_COLUMNS), gluon=True, swizzled=False),
        "lse2_BHS": Array("lse2", "float32"),
        "delta_BHS": Array("delta", "float32"),
        "rows_ptr": Array("rows", "int32"),
        "key_ranges_ptr": call.array("extents", "int32", "key_ranges"),
        "key_extents_ptr": call.array("key_extents", "int32"),
        "bounds_ptr": None if "key_extents" in call.array_names else call.array("extents", "int32", "bounds"),
        "intervals_ptr": call.array("key_extents", "int32", "intervals"),
        "query_tiles_ptr": Array("query_tiles", "int32") if call.by_extents else None,
        "key_mask_BT": call.array("key_mask"),
        "key_mask_spans_ptr": call.array("key_mask", "int32", "key_mask_spans"),
        "alibi_slopes_ptr": call.array("alibi_slopes"),
        "dropout_BH": call.array("dropout_seed", "uint32", "dropout"),
        "dq_RX": Array("dq", "float32"),
        "dk_BTGD": Array("dkv" if call.packed else "dk", dtype),
        "dv_BTGE": None if call.packed else Array("dv", dtype),
        "scale": Scalar(call.scale, "fp32"),
        **call.numbers,
        "together": Scalar(kv_heads_together(call), "i32"),
        **call.head_counts,
    }
    constants = {
        "D": call.head_dim,
        "E": call.v_dim,
        "K_STRIDE": key_pitch,
        "V_STRIDE": value_pitch,
        "V_COLUMN": call.head_dim if call.packed else 0,
        "Q_RUNS": call.q_runs,
        "K_RUNS": call.k_runs,
        "BLOCK_Q": block_q,
        "BLOCK_K": HOPPER_BACKWARD_KEYS,
        "BLOCK_D": width,
        "ZERO_MASKED": call.zero_masked,
        "FULLY_MASKED": call.fully_masked,
        "ALIGNED": call.aligned,
        "STAGES": 3,
        "OUT_STAGES": 3 if block_q == 64 and "extents" not in call.array_names else 2,  # limited by shared memory
    }
    present = tuple((parameter, x) for parameter, x in arguments.items() if x is not None)
    dq = Output("dq", sums_of_dq(call), "float32", "dq_in")
    grid = call.k_tiles(HOPPER_BACKWARD_KEYS) * call.kv_heads * call.batch
    return Launch("hopper_backward", grid, present, tuple(constants.items()), (dq, *gradients), 8, 1)


def kv_heads_together(call: RingCall, block_k: int = HOPPER_BACKWARD_KEYS) -> int:
    """Return how many (batch row, key head) pairs the backward processes at a time. ``block_k``: number of keys per tile."""
    enough = -(-KEY_TILES_TOGETHER * HOPPER_BACKWARD_KEYS // block_k // call.k_tiles(block_k))
    return min(enough, KV_HEADS_TOGETHER, call.batch * call.kv_heads)


@lru_cache(maxsize=4096)
def dq(call: RingCall) -> Launch:
    """Return the launch that computes ``dq`` in the input dtype from the float32 ``sums`` of all steps of ``backward``."""
    arguments = {
        "sums_RX": Array("sums", "float32"),
        "dq_BSHD": Array("dq", call.dtype),
        "scale": Scalar(call.scale, "fp32"),
        "S": Scalar(call.seq_local, "i32"),
        "H": Scalar(call.heads, "i32"),
    }
    constants = {
        "D": call.head_dim,
        "Q_RUNS": call.q_runs,
        "BLOCK_Q": queries(call),
        "BLOCK_D": columns(call.head_dim),
    }
    output = Output("dq", (call.batch, call.seq_local, call.heads, call.head_dim), call.dtype)
    grid = call.q_tiles(queries(call)) * call.heads * call.batch
    return Launch("hopper_dq", grid, tuple(arguments.items()), tuple(constants.items()), (output,), 4, 1)
