"""The sizes of a layer, and the checks of its arguments."""

from __future__ import annotations

from ..problem.checks import check_dropout_rate, check_softcap


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
