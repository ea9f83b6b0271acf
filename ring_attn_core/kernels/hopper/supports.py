"""The calls that Hopper's kernels accept, and the reasons for refusing the others."""

from __future__ import annotations

from typing import NamedTuple

from ..call import RingCall

WIDEST = 256


def refusal(call: RingCall) -> str | None:
    """Return why Hopper's kernels refuse a call, so that the portable kernels run it; None if they accept it."""
    reason = refusal_of_shape(call.dtype, call.head_dim, call.v_dim)
    if call.capability != 90:
        reason = f"it is for sm_90, and this GPU is sm_{call.capability}"
    elif not call.tma:
        reason = "it reads by TMA descriptors, which this jaxlib cannot make"
    elif min(call.batch, call.seq_local, call.kv_local) == 0:
        reason = "a TMA descriptor of an empty array cannot be made"
    return reason


def refusal_of_shape(dtype: str, head_dim: int, v_dim: int) -> str | None:
    """Return why Hopper's kernels refuse a dtype or head dimensions, or None if they accept them."""
    if dtype not in ("bfloat16", "float16"):
        return f"its products are of bfloat16 and float16, not {dtype}"
    for name, width in (("head_dim", head_dim), ("v_dim", v_dim)):
        if width % 8 or width > WIDEST:
            return f"it takes head sizes that 8 divides, of at most {WIDEST}, and {name} is {width}"
    if columns(v_dim) > columns(head_dim):
        return f"values may not be wider than keys, and v_dim is {v_dim} of head_dim {head_dim}"
    return None


def columns(width: int) -> int:
    """Return the padded head dimension of a tile: 64, 128 or 256. TMA reads 0 beyond ``width``."""
    return 64 if width <= 64 else 128 if width <= 128 else 256


class TileColumns(NamedTuple):
    """The padded columns of a tile in two parts, each a power of two; ``tail`` may be 0."""

    main: int
    tail: int

    @property
    def total(self) -> int:
        return self.main + self.tail


def in_parts(width: int) -> TileColumns:
    """Return the padded head dimension of a tile as main and tail part: 129 to 192 columns take 128 + 64, not 256."""
    return TileColumns(128, 64) if 128 < width <= 192 else TileColumns(columns(width), 0)
