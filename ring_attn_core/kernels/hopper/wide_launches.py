"""The launches of Hopper's two-pass backward, for calls to which ``tile_sizes.hopper_passes`` assigns two passes."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ..call import RingCall
from ..launch import Argument, Array, Launch, Output, Scalar
from ..tile_sizes import WideConfig, wide_tiles
from .launches import PROGRAMS, extent_lists, heads_together, kv_heads_together, parts
from .supports import in_parts

BLOCK_K = 64
"""Number of keys in a key tile of the pass of dk and dv; each program has one key tile."""


@lru_cache(maxsize=4096)
def dq(call: RingCall, portable: Launch) -> Launch:
    """Return the launch of the pass of dq, with the outputs of ``portable``, the launch of the portable dq."""
    tiles = tiles_of(call)
    constant = dict(portable.constants)
    constants = {
        **{name: constant[name] for name in ("D", "V_COLUMN", "Q_RUNS", "K_RUNS")},
        "BLOCK_Q": tiles.block_q,
        "BLOCK_K": tiles.block_k,
        **_widths(call),
        "STAGES": tiles.k_stages,
        "V_STAGES": tiles.v_stages,
        "IN_REGISTERS": tiles.q_in_registers,
        "REGISTERS": tiles.registers,
        "PRODUCER_REGISTERS": tiles.producer_registers,
        **{name: constant[name] for name in ("FIRST", "ZERO_MASKED", "ALIGNED")},
        "FULLY_MASKED": call.fully_masked,
    }
    total = call.q_tiles(tiles.block_q) * call.heads * call.batch
    numbers = {"together": Scalar(heads_together(call), "i32"), "total": Scalar(total, "i32")}
    arguments: dict[str, Argument] = {}
    for parameter, argument in _arguments(
        call, portable, 64, tiles.block_k, "key_tiles", "intervals", "tile_order", "not_finite"
    ).items():
        if parameter == "dq_BSHD":
            arguments["tickets_in_ptr"] = Array("tickets_in", "int32")
        arguments[parameter] = argument
        if parameter == "dq_BSHD":
            arguments["tickets_ptr"] = Array("tickets", "int32")
    arguments |= numbers | call.head_counts
    return replace(
        portable, kernel="hopper_wide_dq", grid=min(total, PROGRAMS), arguments=tuple(arguments.items()),
        constants=tuple(constants.items()), warps=4, stages=1, scratch=(Output("tickets", (1,), "int32", over="tickets_in"),),
    )  # fmt: skip


@lru_cache(maxsize=4096)
def dkv(call: RingCall, portable: Launch) -> Launch:
    """Return the launch that computes dk and dv. Its outputs are those of ``portable``, the launch of the portable dkv."""
    tiles = tiles_of(call)
    constant = dict(portable.constants)
    constants = {
        **{name: constant[name] for name in ("D", "E", "K_STRIDE", "V_STRIDE", "V_COLUMN", "Q_RUNS", "K_RUNS")},
        "BLOCK_Q": tiles.dkv_block_q,
        "BLOCK_K": BLOCK_K,
        **_widths(call),
        "FIRST": constant["FIRST"],
        "ZERO_MASKED": call.zero_masked,
        "FULLY_MASKED": call.fully_masked,
        "ALIGNED": constant["ALIGNED"],
        "STAGES": tiles.q_stages,
        "IN_REGISTERS": tiles.kv_in_registers,
        "REGISTERS": tiles.registers,
        "PRODUCER_REGISTERS": tiles.producer_registers,
    }
    known = _arguments(call, portable, tiles.dkv_block_q, BLOCK_K, "intervals", "query_tiles")
    ranges = ("key_ranges_ptr", Array("key_ranges", "int32"))
    arguments: dict[str, Argument] = dict(ranges if argument[0] == "extents_ptr" else argument for argument in known.items())
    arguments |= {"together": Scalar(kv_heads_together(call, BLOCK_K), "i32"), **call.head_counts}
    return replace(
        portable, kernel="hopper_wide_dkv", grid=call.k_tiles(BLOCK_K) * call.kv_heads * call.batch,
        arguments=tuple(arguments.items()), constants=tuple(constants.items()), warps=4, stages=1,
    )  # fmt: skip


def tiles_of(call: RingCall) -> WideConfig:
    """Return the tile sizes, stages and registers of both passes of the backward; only those of dk and dv depend on tokens."""
    tokens = call.seq_local if call.ordered else call.kv_local  # in order of position a rank has a part of the keys
    return wide_tiles(in_parts(call.head_dim).total, in_parts(call.v_dim).total, tokens)


def _widths(call: RingCall) -> dict[str, int]:
    d, e = in_parts(call.head_dim), in_parts(call.v_dim)
    return {"BLOCK_D": d.main, "TAIL_D": d.tail, "BLOCK_E": e.main, "TAIL_E": e.tail}


def _arguments(call: RingCall, portable: Launch, q_rows: int, k_rows: int, *lists: str) -> dict[str, Argument]:
    """Return the arguments of ``portable``, with TMA descriptors in place of q, dout, k and v, and the needed ``lists``."""
    d, e, both = in_parts(call.head_dim), in_parts(call.v_dim), call.head_dim + call.v_dim
    keys, values = ("kv", "kv") if call.packed else ("k", "v")
    k_pitch, v_width = (both, both) if call.packed else (call.head_dim, call.v_dim)
    q_shape, k_shape = (call.batch, call.seq_local, call.heads), (call.batch, call.kv_local, call.kv_heads)
    spans = call.array("key_mask", "int32", "key_mask_spans")
    arguments: dict[str, Argument] = {
        **parts("q", "BSHD", "q", call.dtype, (*q_shape, call.head_dim), q_rows, d),
        **parts("dout", "BSHE", "dout", call.dtype, (*q_shape, call.v_dim), q_rows, e),
        **parts("k", "BTGD", keys, call.dtype, (*k_shape, call.head_dim), k_rows, d, k_pitch),
        **parts("v", "BTGE", values, call.dtype, (*k_shape, v_width), k_rows, e),
        **({"key_mask_spans_ptr": spans} if spans else {}),
    }
    for parameter, argument in portable.arguments:
        if parameter in ("dq_in_BSHD", "dq_BSHD", "dk_in_BTGD", "dk_BTGD"):
            arguments |= extent_lists(call, *lists)
        arguments.setdefault(parameter, argument)
    return arguments
