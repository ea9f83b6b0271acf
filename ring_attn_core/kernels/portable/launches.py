"""The launches of the portable kernels, made by pure functions; extent_launches.py holds those for extents and key extents."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from ..call import RingCall
from ..decode_call import NATIVE_FP8, DecodeCall
from ..launch import Argument, Array, Descriptor, Launch, Output, Scalar
from ..tile_sizes import MASK_BLOCK, MASK_SPAN, TileConfig, pad_width

MIN_FOLDED = 1e-20
"""A scale is folded into the exponential's multiply-add only above this bound, because Hopper's kernels then divide ALiBi slopes
by the scale."""

SCAN = 2048
"""Number of slots of a cache that a program of ``decode`` tests at once when it skips slots that no query sees."""

MERGED_AT_ONCE = 32
"""Number of (out, lse) pairs that a program of ``merge_pairs`` holds at once."""


@lru_cache(maxsize=4096)
def forward(call: RingCall, first: bool, last: bool) -> Launch:
    """Return the launch that merges a shard of keys into ``out``, ``lse`` and, for float32, lse's rounding error ``rest``."""
    tiles = call.tiles("forward")
    out = Output("out", (call.batch, call.seq_local, call.heads, call.v_dim), call.dtype if last else "float32")
    lse = tuple(
        Output(name, (call.batch, call.seq_local, call.heads), "float32", None if first else name + "_in")
        for name in (("lse", "rest") if call.carries_rest else ("lse",))
    )
    if not first:
        out = out if last and call.dtype != "float32" else Output(*_fields(out), over="out_in")
    arguments = {
        **_inputs(call, tiles, "q", "q_BSHD"),
        "rows_ptr": Array("rows", "int32"),
        "extents_ptr": call.array("extents", "int32"),
        "key_extents_ptr": call.array("key_extents", "int32"),
        "key_mask_BT": call.array("key_mask"),
        "key_mask_spans_ptr": call.array("key_mask", "int32", "key_mask_spans"),
        "sinks_ptr": call.array("sinks") if first else None,
        "alibi_slopes_ptr": call.array("alibi_slopes"),
        "dropout_BH": call.array("dropout_seed", "uint32", "dropout"),
        "out_in_BSHE": None if first else Array("out_in", "float32"),
        "lse_in_BSH": None if first else Array("lse_in", "float32"),
        "rest_in_BSH": Array("rest_in", "float32") if call.carries_rest and not first else None,
        "out_BSHE": Array("out", out.dtype),
        "lse_BSH": Array("lse", "float32"),
        "rest_BSH": Array("rest", "float32") if call.carries_rest else None,
        **call.numbers,
    }
    constants = {
        **_constants(call, tiles),
        "FIRST": first,
        "LAST": last,
        "FOLDED": call.scale > MIN_FOLDED,
        "ZERO_MASKED": _zero_masked(call),
    }
    if call.tail is not None:
        constants |= {"BLOCK_D": pad_width(call.v_dim), "BLOCK_TAIL": pad_width(call.tail) if call.tail else 0}
    grid = call.q_tiles(tiles.block_q) * call.heads * call.batch
    return launch_of("forward", grid, arguments, constants, (out, *lse), tiles)


@lru_cache(maxsize=4096)
def delta(call: RingCall, out_dtype: str) -> Launch:
    """Return the launch of ``lse2`` (lse in base 2) and ``delta`` = out . dout - dlse, [batch, heads, tokens] each. For float32
    the third output is ``factor``, by which the caller multiplies dout and delta."""
    tiles = call.tiles("delta")
    shape = call.batch, call.heads, call.seq_local
    arguments = {
        "out_BSHE": Array("out", out_dtype),
        "lse_BSH": Array("lse", "float32"),
        "rest_BSH": Array("rest", "float32") if call.carries_rest else None,
        "dout_BSHE": Array("dout", call.dtype),
        "dlse_BSH": Array("dlse", "float32"),
        "lse2_BHS": Array("lse2", "float32"),
        "delta_BHS": Array("delta", "float32"),
        "factor_BHS": Array("factor", "float32") if call.carries_rest else None,
        "S": Scalar(call.seq_local, "i32"),
        "H": Scalar(call.heads, "i32"),
    }
    constants = {"E": call.v_dim, "BLOCK_Q": tiles.block_q, "BLOCK_E": pad_width(call.v_dim)}
    names = ("lse2", "delta", "factor") if call.carries_rest else ("lse2", "delta")
    outputs = tuple(Output(name, shape, "float32") for name in names)
    grid = -(-call.seq_local // tiles.block_q) * call.heads * call.batch
    return launch_of("delta", grid, arguments, constants, outputs, tiles)


@lru_cache(maxsize=4096)
def unpack_key_mask(batch: int, kv_local: int) -> Launch:
    """Return the launch that unpacks ``key_mask_bits`` to ``key_mask``, f32 [batch, tokens], +inf for a visible key, else -inf.
    ``key_mask_spans``, int32 [batch, spans], is 0 if all MASK_SPAN keys are visible: kernels then skip the mask."""
    arguments = {
        "key_mask_bits_ptr": Array("key_mask_bits", "uint8"),
        "key_mask_BT": Array("key_mask", "float32"),
        "key_mask_spans_ptr": Array("key_mask_spans", "int32"),
        "T": Scalar(kv_local, "i32"),
    }
    tiles = -(-kv_local // MASK_BLOCK)
    spans = Output("key_mask_spans", (batch, tiles * (MASK_BLOCK // MASK_SPAN)), "int32")
    outputs = Output("key_mask", (batch, kv_local), "float32"), spans
    constants, config = {"BLOCK_K": MASK_BLOCK}, TileConfig(0, MASK_BLOCK, 4, 1)
    return launch_of("unpack_key_mask", tiles * batch, arguments, constants, outputs, config)


@lru_cache(maxsize=4096)
def philox_keys(batch: int, heads: int) -> Launch:
    """Return the launch that computes the Philox keys ``dropout`` [batch, heads] from ``dropout_seed``."""
    arguments = {
        "dropout_seed_ptr": Array("dropout_seed", "uint32"),
        "dropout_BH": Array("dropout", "uint32"),
        "B": Scalar(batch, "i32"),
        "H": Scalar(heads, "i32"),
    }
    outputs = (Output("dropout", (batch, heads), "uint32"),)
    return launch_of("philox_keys", -(-batch * heads // 128), arguments, {"BLOCK": 128}, outputs, TileConfig(0, 0, 4, 1))


@lru_cache(maxsize=4096)
def dq(call: RingCall, first: bool, last: bool) -> Launch:
    """Return the launch that adds one shard's gradient to ``dq``, float32 over ``dq_in`` until the ``last`` step."""
    tiles = call.tiles("dq")
    out = Output("dq", (call.batch, call.seq_local, call.heads, call.head_dim), call.dtype if last else "float32")
    if not first and out.dtype == "float32":
        out = Output(*_fields(out), over="dq_in")
    arguments = {
        **_inputs(call, tiles, "q", "q_BSHD", "dout_BSHE"),
        **_backward_inputs(call),
        "key_mask_spans_ptr": call.array("key_mask", "int32", "key_mask_spans"),
        "dq_in_BSHD": None if first else Array("dq_in", "float32"),
        "dq_BSHD": Array("dq", out.dtype),
        "scale": Scalar(call.scale, "fp32"),
        **call.numbers,
    }
    constants = {**_constants(call, tiles), "FIRST": first, "LAST": last, "ZERO_MASKED": _zero_masked(call)}
    grid = call.q_tiles(tiles.block_q) * call.heads * call.batch
    return launch_of("dq", grid, arguments, constants, (out,), tiles)


@lru_cache(maxsize=4096)
def dkv(call: RingCall, first: bool, last: bool) -> Launch:
    """Return the launch of one shard's gradients, ``dkv`` if packed, else ``dk`` and ``dv``, plus earlier steps' unless
    ``first``. ``last``: the gradients are complete and get the input's dtype."""
    tiles = call.tiles("dkv")
    dtype = call.dtype if last else "float32"
    shape = call.batch, call.kv_local, call.kv_heads
    over = lambda name: name + "_in" if not first and dtype == "float32" else None
    if call.packed:
        outputs: tuple[Output, ...] = (Output("dkv", (*shape, call.head_dim + call.v_dim), dtype, over("dkv")),)
        names = {"dk": "dkv"}
    else:
        outputs = Output("dk", (*shape, call.head_dim), dtype, over("dk")), Output("dv", (*shape, call.v_dim), dtype, over("dv"))
        names = {"dk": "dk", "dv": "dv"}
    suffix = {"dk": "_BTGD", "dv": "_BTGE"}
    carried = {} if first else {f"{p}_in{suffix[p]}": Array(name + "_in", "float32") for p, name in names.items()}
    arguments = {
        **_inputs(call, tiles, "kv", "q_BSHD", "dout_BSHE"),
        **_backward_inputs(call),
        "bounds_ptr": Array("bounds", "int32") if "extents" in call.array_names else None,
        **carried,
        **{p + suffix[p]: Array(name, dtype) for p, name in names.items()},
        "scale": Scalar(call.scale, "fp32"),
        **call.numbers,
    }
    constants = {**_constants(call, tiles), "FIRST": first}
    grid = call.k_tiles(tiles.block_k) * call.kv_heads * call.batch
    return launch_of("dkv", grid, arguments, constants, outputs, tiles)


def _fields(output: Output) -> tuple[str, tuple[int, ...], str]:
    return output.name, output.shape, output.dtype


def _inputs(call: RingCall, tiles: TileConfig, own: str, *optional: str) -> dict[str, Argument]:
    """Return a kernel's arguments for q, k, v and dout: pointers, or TMA descriptors of tiles. ``own``: "q" or "kv", if a program
    loads a single tile of it. With ``call.tail`` the values are columns of k, and v has no argument."""
    k_stride, v_stride, _ = call.key_columns
    k_name, v_name = ("kv", "kv") if call.packed else ("k", "v")
    by_tma = tiles.tma and tma_fits(call)

    def tiled(name: str, tokens: int, heads: int, stride: int, rows: int, width: int, whose: str) -> Argument:
        if not by_tma:
            return Array(name, call.dtype)
        if whose == own:
            return Descriptor(name, call.dtype, (call.batch * tokens, heads * stride), (rows, width))
        return Descriptor(name, call.dtype, (call.batch, tokens, heads, stride), (1, rows, 1, width))

    q_shape, k_shape = (call.seq_local, call.heads), (call.kv_local, call.kv_heads)
    arguments: dict[str, Argument] = {}
    parts = {"": call.v_dim, "_tail": call.tail} if call.tail else {"": call.head_dim}
    for part, width in parts.items():
        arguments[f"q{part}_BSHD"] = tiled("q", *q_shape, call.head_dim, tiles.block_q, width, "q")
    if "dout_BSHE" in optional:
        arguments["dout_BSHE"] = tiled("dout", *q_shape, call.v_dim, tiles.block_q, call.v_dim, "q")
    for part, width in parts.items():
        arguments[f"k{part}_BTGD"] = tiled(k_name, *k_shape, k_stride, tiles.block_k, width, "kv")
    if call.tail is None:
        arguments["v_BTGE"] = tiled(v_name, *k_shape, v_stride, tiles.block_k, call.v_dim, "kv")
    return arguments


def of_decode(call: DecodeCall) -> Iterator[Launch]:
    """Yield the launches of decoding on one rank and on two ranks; more ranks use the kernels compiled for two ranks."""
    yield decode(call)
    for ranks in (None, 2):
        for final in (True, False):
            yield merge_pairs(call, ranks, final)


@lru_cache(maxsize=4096)
def decode(call: DecodeCall) -> Launch:
    """Return the launch over splits of a cache; ``pairs`` [splits, batch, queries, heads, v_dim + 1] get out and lse."""
    tiles, array_names, log2e = call.tiles, call.array_names, math.log2(math.e)
    optional = lambda name, dtype="float32": Array(name, dtype) if name in array_names else None
    key_dtype, cap = "uint8" if call.fp8 else call.dtype, call.softcap
    arguments = {
        "q_BNHD": Array("q", call.dtype),
        "k_BTGD": Array("k", key_dtype),
        "v_BTGE": Array("v", key_dtype),
        "q_positions_BN": Array("q_positions", "int32"),
        "k_positions_BT": Array("k_positions", "int32"),
        "tree_mask_BNN": optional("tree_mask", "uint8"),
        "depths_BN": Array("depths", "int32") if "tree_mask" in array_names else None,
        "alibi_slopes_ptr": optional("alibi_slopes"),
        "k_scale_ptr": optional("k_scale"),
        "v_scale_ptr": optional("v_scale"),
        "pairs_SBNHE": Array("pairs", "float32"),
        "inner": Scalar(call.scale * log2e if cap is None else call.scale / cap, "fp32"),
        "softcap": None if cap is None else Scalar(cap * log2e, "fp32"),
        "window": None if call.window is None else Scalar(call.window, "i32"),
        "N": Scalar(call.queries, "i32"),
        "T": Scalar(call.slots, "i32"),
        "B": Scalar(call.batch, "i32"),
        "SPLITS": Scalar(call.splits, "i32"),
    }
    constants = {
        "H": call.heads,
        "G": call.kv_heads,
        "D": call.head_dim,
        "E": call.v_dim,
        "BLOCK_M": tiles.block_q,
        "BLOCK_K": tiles.block_k,
        "BLOCK_D": pad_width(call.head_dim),
        "BLOCK_E": pad_width(call.v_dim),
        "SCAN": SCAN,
        "FP8": 0 if not call.fp8 else 1 if call.capability >= NATIVE_FP8 else 2,
        "PRECISION": "ieee",
    }
    pairs = Output("pairs", (call.splits, call.batch, call.queries, call.heads, call.v_dim + 1), "float32")
    grid = call.kv_heads * call.row_tiles * call.splits * call.batch if call.queries else 0
    return launch_of("decode", grid, arguments, constants, (pairs,), tiles)


@lru_cache(maxsize=4096)
def merge_pairs(call: DecodeCall, ranks: int | None, final: bool) -> Launch:
    """Return the launch that merges ``pairs`` [splits or ranks, batch, queries, heads, v_dim + 1] into ``merged``, packed
    likewise. ``final``: merge the sinks too, into ``out`` in q's dtype and ``lse``."""
    b, n, h, e = call.batch, call.queries, call.heads, call.v_dim
    arguments = {
        "pairs_SRE": Array("pairs", "float32"),
        "sinks_ptr": Array("sinks", "float32") if final and "sinks" in call.array_names else None,
        "merged_RE": None if final else Array("merged", "float32"),
        "out_RE": Array("out", call.dtype) if final else None,
        "lse_R": Array("lse", "float32") if final else None,
        "S": Scalar(call.splits if ranks is None else ranks, "i32"),
        "ROWS": Scalar(b * n * h, "i32"),
    }
    constants = {"H": h, "E": e, "BLOCK_S": MERGED_AT_ONCE, "BLOCK_E": pad_width(e)}
    outputs = Output("out", (b, n, h, e), call.dtype), Output("lse", (b, n, h), "float32")
    if not final:
        outputs = (Output("merged", (b, n, h, e + 1), "float32"),)
    return launch_of("merge_pairs", b * n * h, arguments, constants, outputs, TileConfig(0, 0, 4, 1))


def tma_fits(call: RingCall) -> bool:
    """Return whether the call may use TMA: no padded columns, rows of a multiple of 16 bytes, and no empty array."""
    itemsize = 4 if call.dtype == "float32" else 2
    widths = call.head_dim, call.v_dim
    if call.tail is not None:
        widths = (call.v_dim, call.tail) if call.tail else (call.head_dim,)
    whole = call.tma and all(width == pad_width(width) and width * itemsize % 16 == 0 for width in widths)
    return whole and min(call.batch, call.seq_local, call.kv_local) > 0


def _backward_inputs(call: RingCall) -> dict[str, Argument | None]:
    return {
        "lse2_BHS": Array("lse2", "float32"),
        "delta_BHS": Array("delta", "float32"),
        "rows_ptr": Array("rows", "int32"),
        "extents_ptr": call.array("extents", "int32"),
        "key_extents_ptr": call.array("key_extents", "int32"),
        "key_mask_BT": call.array("key_mask"),
        "alibi_slopes_ptr": call.array("alibi_slopes"),
        "dropout_BH": call.array("dropout_seed", "uint32", "dropout"),
    }


def _constants(call: RingCall, tiles: TileConfig) -> dict[str, Any]:
    k_stride, v_stride, v_column = call.key_columns
    return {
        "H": call.heads,
        "G": call.kv_heads,
        "D": call.head_dim,
        "E": call.v_dim,
        "K_STRIDE": k_stride,
        "V_STRIDE": v_stride,
        "V_COLUMN": v_column,
        "Q_RUNS": call.q_runs,
        "K_RUNS": call.k_runs,
        "BLOCK_Q": tiles.block_q,
        "BLOCK_K": tiles.block_k,
        "BLOCK_D": pad_width(call.head_dim),
        "BLOCK_E": pad_width(call.v_dim),
        "ALIGNED": call.aligned,
        "TMA": tiles.tma and tma_fits(call),
        "PRECISION": "tf32" if call.tf32 else "ieee",
    }


def _zero_masked(call: RingCall) -> int:
    """Return how ``loads.keep_seen`` zeroes unused keys: 0 not at all, 1 by ``tl.where``, 2 by AND, before Hopper."""
    return 0 if not call.zero_masked else 1 if call.capability >= 90 else 2


def launch_of(
    kernel: str,
    grid: int,
    arguments: dict[str, Any],
    constants: dict[str, Any],
    outputs: tuple[Output, ...],
    tiles: TileConfig,
) -> Launch:
    present = tuple((parameter, argument) for parameter, argument in arguments.items() if argument is not None)
    return Launch(kernel, grid, present, tuple(constants.items()), outputs, tiles.warps, tiles.stages)
