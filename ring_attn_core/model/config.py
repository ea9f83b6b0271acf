"""What a model is, as frozen records: sizes and numbers, checked and with their defaults filled in. No weights, no devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..masks import causal, check_mask
from ..problem.checks import check_dropout_rate, check_softcap
from ..runs import Band
from .masks import layer_masks


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """What a RingAttention computes, under the names of its arguments.

    ``kv_heads`` None becomes ``heads`` and ``head_dim`` None ``dim / heads``. Raises ValueError for sizes that do not fit and
    numbers outside their range.
    """

    dim: int
    heads: int
    kv_heads: int = None  # type: ignore[assignment]  # filled in below, an int from then on
    head_dim: int = None  # type: ignore[assignment]
    mask: Band = field(default_factory=causal)
    rotary_base: float | None = 10000.0
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    dropout_rate: float = 0.0

    def __post_init__(self) -> None:
        kv_heads, head_dim = head_sizes(self.dim, self.heads, self.kv_heads, self.head_dim)
        check_mask(self.mask)
        check_scores(self.softcap, self.sinks, self.alibi, self.dropout_rate)
        object.__setattr__(self, "kv_heads", kv_heads)
        object.__setattr__(self, "head_dim", head_dim)

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the values by name, as RingAttention takes them."""
        return {x.name: getattr(self, x.name) for x in fields(self)}


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """What a RingTransformer computes, under the names of its arguments.

    ``hidden`` None becomes ``hidden_size(dim)``. Raises ValueError for sizes that do not fit and numbers outside their range.
    """

    vocab: int
    dim: int
    depth: int
    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    hidden: int = None  # type: ignore[assignment]  # filled in below, an int from then on
    mask: Band = field(default_factory=causal)
    windows: Sequence[int | None] | None = None
    rotary_base: float | None = 10000.0
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    dropout_rate: float = 0.0
    tied: bool = True

    def __post_init__(self) -> None:
        check_sizes(vocab=self.vocab, dim=self.dim, depth=self.depth)
        hidden = hidden_size(self.dim) if self.hidden is None else self.hidden
        check_sizes(hidden=hidden)
        object.__setattr__(self, "hidden", hidden)
        layer_masks(self.mask, self.windows, self.depth)
        object.__setattr__(self, "windows", None if self.windows is None else tuple(self.windows))
        self.attention(0)

    def attention(self, layer: int) -> AttentionConfig:
        """Return what the attention of a layer, from 0, computes: they differ in their masks."""
        shared: dict[str, Any] = {x.name: getattr(self, x.name) for x in fields(AttentionConfig)}
        shared["mask"] = layer_masks(self.mask, self.windows, self.depth)[layer]
        return AttentionConfig(**shared)


def check_sizes(**sizes: int) -> None:
    """ValueError for a size that is no int of at least 1."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be an int of at least 1, got {size!r}")


def head_sizes(dim: int, heads: int, kv_heads: int | None, head_dim: int | None) -> tuple[int, int]:
    """(kv_heads, head_dim), where None means as many as query heads and ``dim / heads``.

    Raises ValueError where heads do not divide ``dim`` and no head_dim is given, and where kv_heads do not divide heads.
    """
    check_sizes(dim=dim, heads=heads)
    if head_dim is None:
        if dim % heads:
            raise ValueError(
                f"dim={dim} cannot be split over heads={heads}: choose a number of heads that divides dim, or pass head_dim, "
                "which need not be dim / heads"
            )
        head_dim = dim // heads
    kv_heads = heads if kv_heads is None else kv_heads
    check_sizes(kv_heads=kv_heads, head_dim=head_dim)
    if heads % kv_heads:
        raise ValueError(f"kv_heads={kv_heads} must divide heads={heads}: choose a divisor, 1 for multi-query attention")
    return kv_heads, head_dim


def check_scores(softcap: float | None, sinks: bool, alibi: bool, dropout_rate: float) -> None:
    """ValueError for numbers outside their range: where the layer is made, and not only at its first call."""
    check_softcap(softcap)
    check_dropout_rate(dropout_rate)
    for name, flag in (("sinks", sinks), ("alibi", alibi)):
        if not isinstance(flag, bool):
            raise ValueError(
                f"{name} must be True or False, got {flag!r}: the layer makes the numbers itself, one for every head"
            )


def hidden_size(dim: int) -> int:
    """8/3 of ``dim``, rounded up to a multiple of 64: three such matrices weigh as much as the two of a plain MLP of 4 dim."""
    return -(-8 * dim // (3 * 64)) * 64
