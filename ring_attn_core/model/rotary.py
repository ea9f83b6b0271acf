"""Rotary position embeddings: what their arguments must be.

Frequencies and angles are made in ``RotaryEmbedding._turns`` in ``layers/rotary.py`` of both packages. A scaling of them, such as
YaRN's, would go there, and the check of its arguments here.
"""

from __future__ import annotations

from .config import check_sizes


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
