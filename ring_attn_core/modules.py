"""What the layers of both packages work out from their sizes: heads, hidden sizes, and whether a state fits a module."""

from __future__ import annotations

from collections.abc import Mapping

Shapes = Mapping[str, tuple[int, ...]]


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


def check_rotary(head_dim: int, base: float) -> None:
    """ValueError for an odd head_dim, which has no pairs to rotate, and for a base of at most 1."""
    check_sizes(head_dim=head_dim)
    if head_dim % 2:
        raise ValueError(
            f"rotary embeddings turn pairs, so head_dim must be even, got {head_dim}: pass an even head_dim, or rotary_base=None "
            "for attention without positions"
        )
    if not base > 1:
        raise ValueError(
            f"the base of rotary embeddings must be greater than 1, got {base!r}: 10000.0 is usual, long contexts take more"
        )


def hidden_size(dim: int) -> int:
    """8/3 of ``dim``, rounded up to a multiple of 64: three such matrices weigh as much as the two of a plain MLP of 4 dim."""
    return -(-8 * dim // (3 * 64)) * 64


def check_state(expected: Shapes, got: Shapes) -> None:
    """ValueError that lists every parameter that is missing, unexpected or of another shape."""
    problems = [f"{name} is missing" for name in expected if name not in got]
    problems += [f"{name} is unexpected" for name in got if name not in expected]
    problems += [
        f"{name} is {list(got[name])} and must be {list(shape)}"
        for name, shape in expected.items()
        if name in got and tuple(got[name]) != tuple(shape)
    ]
    if problems:
        listed = "; ".join(problems)
        raise ValueError(f"the state does not fit this module: {listed}. Build the module with the sizes the state was made with")
