"""Hopper's own kernels as launches: which calls they take, and what they are passed instead of what the portable ones are."""

from __future__ import annotations

from dataclasses import replace

from .calls import Call
from .launch import Argument, Descriptor, Launch, Scalar
from .tiles import HopperConfig, hopper_tiles

WIDEST = 256
L2_SHARE = 8 * 2**20
"""Bytes of keys and values in the L2 cache for the heads that run at a time.

TFLOP/s on one H200 with one head of keys / 8 / 16 / 32 / 64 MiB, causal: 16,384 tokens, 32/8 heads of 128 627 / 630 / 627 / 623 /
625, 32/32 of 64 439 / 444 / 441 / 432 / 424; 4 x 4,096 tokens, 16/16 of 128 513 / 535 / 530 / 537 / 528.
"""


def refusal(call: Call) -> str | None:
    """Why the Hopper forward does not take a call, in words; None where it does. The portable kernel takes what it refuses."""
    reason = refusal_of_shape(call.dtype, call.head_dim, call.v_dim)
    if call.capability != 90:
        reason = f"it is for sm_90, and this GPU is sm_{call.capability}"
    elif not call.tma:
        reason = "it reads by TMA descriptors, which this jaxlib cannot make"
    elif min(call.batch, call.seq_local, call.kv_local) == 0:
        reason = "a TMA descriptor of an empty array cannot be made"
    return reason


def refusal_of_shape(dtype: str, head_dim: int, v_dim: int) -> str | None:
    """What of it depends on the arrays' dtype and last dimensions only."""
    if dtype not in ("bfloat16", "float16"):
        return f"its products are of bfloat16 and float16, not {dtype}"
    for name, width in (("head_dim", head_dim), ("v_dim", v_dim)):
        if width % 8 or width > WIDEST:
            return f"it takes head sizes that 8 divides, of at most {WIDEST}, and {name} is {width}"
    if columns(v_dim) > columns(head_dim):
        return f"values may not be wider than keys, and v_dim is {v_dim} of head_dim {head_dim}"
    return None


def columns(width: int) -> int:
    """Of the tile that holds rows of ``width``: TMA reads 0 beyond them."""
    return 64 if width <= 64 else 128 if width <= 128 else 256


def forward(call: Call, portable: Launch) -> Launch:
    """The Hopper kernel in place of the portable one, with its arrays and outputs."""
    d, e = columns(call.head_dim), columns(call.v_dim)
    tiles = hopper_tiles(d, e, call.features)
    given = dict(portable.constants)
    constants = {
        **{name: given[name] for name in ("H", "G", "E", "V_COLUMN", "Q_RUNS", "K_RUNS")},
        **{name: given[name] for name in ("FIRST", "LAST", "FOLDED", "CLEAN", "ALIGNED")},
        "BLOCK_Q": tiles.block_q,
        "BLOCK_K": tiles.block_k,
        "BLOCK_D": d,
        "BLOCK_E": e,
        "STAGES": tiles.stages,
        "AHEAD": tiles.ahead,
        "Q_IN_REGISTERS": tiles.q_in_registers,
        "REGISTERS": tiles.registers,
        "PRODUCER_REGISTERS": tiles.producer_registers,
    }
    descriptors = _descriptors(call, tiles, d, e)
    return replace(
        portable,
        kernel="hopper_forward",
        grid=call.q_tiles(tiles.block_q) * call.heads * call.batch,
        arguments=(
            *((parameter, descriptors.get(parameter, x)) for parameter, x in portable.arguments),
            ("together", Scalar(_heads_together(call), "i32")),
        ),
        constants=tuple(constants.items()),
        warps=4,
        stages=1,
    )


def _descriptors(call: Call, tiles: HopperConfig, d: int, e: int) -> dict[str, Argument]:
    both = call.head_dim + call.v_dim
    k_name, v_name = ("kv", "kv") if call.packed else ("k", "v")
    pitch, v_width = (both, both) if call.packed else (call.head_dim, call.v_dim)
    q_shape = call.batch, call.seq_local, call.heads, call.head_dim
    k_shape = call.batch, call.kv_local, call.kv_heads, call.head_dim
    return {
        "q_BSHD": Descriptor("q", call.dtype, q_shape, (1, 64, 1, d), gluon=True),
        "k_BTGD": Descriptor(k_name, call.dtype, k_shape, (1, tiles.block_k, 1, d), pitch, gluon=True),
        "v_BTGE": Descriptor(v_name, call.dtype, (*k_shape[:3], v_width), (1, tiles.block_k, 1, e), gluon=True),
    }


def _heads_together(call: Call) -> int:
    """How many query heads run at a time: those of as many heads of keys as share the L2 cache."""
    of_kv_head = 2 * call.kv_local * (call.head_dim + call.v_dim)
    kv_heads = max(L2_SHARE // of_kv_head, 1)
    return min(kv_heads * (call.heads // call.kv_heads), call.batch * call.heads)
