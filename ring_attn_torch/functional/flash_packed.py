"""The functions of the package flash_attn (2.8) that take q, k and v, or k and v, packed in one tensor, over a ring.

``options`` and ``arguments`` are those of ``flash_attn_func``, or of ``flash_attn_varlen_func``, from ``dropout_p`` on, the ring
included: flash_attn has the same ones in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ring_attn_core.validation import in_words

from ..ring.agreement import same_error
from ..ring.groups import group_name, group_of, is_dtensor
from .flash import flash_attn_func, flash_attn_varlen_func

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def flash_attn_qkvpacked_func(qkv: Float[Tensor, "batch seq_local 3 heads head_dim"], *options: Any, **arguments: Any) -> Any:
    """Compute :func:`flash_attn_func` on ``qkv``, this rank's shard of q, k and v. Its other arguments follow."""
    return flash_attn_func(*_unpack("qkv", qkv, "batch, tokens", arguments), *options, **arguments)


def flash_attn_kvpacked_func(
    q: Float[Tensor, "batch seq_local heads head_dim"],
    kv: Float[Tensor, "batch kv_local 2 kv_heads head_dim"],
    *options: Any,
    **arguments: Any,
) -> Any:
    """Compute :func:`flash_attn_func` on q and ``kv``, this rank's shard of k and v. Its other arguments follow."""
    return flash_attn_func(q, *_unpack("kv", kv, "batch, tokens", arguments), *options, **arguments)


def flash_attn_varlen_qkvpacked_func(
    qkv: Float[Tensor, "seq_local 3 heads head_dim"],
    cu_seqlens: Int[Tensor, " ends"],
    max_seqlen: int,
    *options: Any,
    **arguments: Any,
) -> Any:
    """Compute :func:`flash_attn_varlen_func` on ``qkv``, this rank's shard of q, k and v. Its arguments from ``dropout_p`` on
    follow."""
    ends = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    packed: Any = *_unpack("qkv", qkv, "tokens", arguments), *ends, *options
    return flash_attn_varlen_func(*packed, **arguments)


def flash_attn_varlen_kvpacked_func(
    q: Float[Tensor, "seq_local heads head_dim"],
    kv: Float[Tensor, "kv_local 2 kv_heads head_dim"],
    *options: Any,
    **arguments: Any,
) -> Any:
    """Compute :func:`flash_attn_varlen_func` on q and ``kv``, this rank's shard of k and v. Its other arguments follow."""
    return flash_attn_varlen_func(q, *_unpack("kv", kv, "tokens", arguments), *options, **arguments)


def _unpack(name: str, packed: Any, rows: str, arguments: dict[str, Any]) -> tuple[Any, ...]:
    """Return the arrays that ``packed`` holds. If it has another shape than [rows, arrays, heads, head_dim], all ranks raise."""
    with same_error(group_of(group_name(arguments.get("group")))):
        dims = len(rows.split()) + 3
        dense = isinstance(packed, Tensor) and not is_dtensor(packed) and not packed.is_nested
        if not dense or packed.ndim != dims or packed.shape[-3] != len(name):
            raise ValueError(
                f"{name} must be a dense torch.Tensor [{rows}, {len(name)}, heads, head_dim] of {', '.join(name)}, this rank's "
                f"shard, got {in_words(packed)}"
            )
    return packed.unbind(-3)
