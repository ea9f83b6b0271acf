"""Rotary position embeddings; the formulas are in ``model/rotary.py`` of the core."""

from __future__ import annotations

from math import pi
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from ring_attn_core.model.rotary import Rotary, Scaling, attention_factor, check_rotary, inverse_frequencies
from ring_attn_core.validation import as_number, in_words

from ..attend.tiles import accumulation_dtype

COARSE = 1024
"""Number of positions from one coarse angle to the next; RotaryEmbedding adds a coarse and a fine angle."""
TURN = 2**32
"""Number of units in a full turn, if an angle is an integer."""


class Turns(NamedTuple):
    """The cosines (twice) and signed sines of some tokens' angles, [s or b s, 1, head_dim], which layers may share."""

    cos: Tensor
    sin: Tensor

    def of(self, x: Tensor) -> Tensor:
        """Return x [b s h head_dim] rotated, in x's dtype. Raise ValueError if x has another shape or other tokens."""
        head_dim, tokens = self.cos.shape[-1], self.cos.shape[:-2]
        if x.ndim != 4 or x.shape[-1] != head_dim:
            raise ValueError(f"x must be [batch, tokens, heads, {head_dim}], got {list(x.shape)}")
        if tokens not in (x.shape[1:2], x.shape[:2]):
            expected = f"{list(x.shape[1:2])} or {list(x.shape[:2])}"
            raise ValueError(f"positions of x {list(x.shape)} must be {expected}, got {list(tokens)}")
        wide = x.to(self.cos.dtype)
        turned = wide * self.cos
        wide = wide.roll(head_dim // 2, -1)  # frees the array that it replaces
        return torch.addcmul(turned, wide, self.sin).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Rotary position embedding (Su et al., arXiv:2104.09864, equation 34) of the pairs (i, i + head_dim / 2), as in Llama.

        angle_i = position * base ** (-2 i / head_dim)                          0 <= i < head_dim / 2 = h
        y_i     = x_i cos(angle_i) - x_(i+h) sin(angle_i)
        y_(i+h) = x_(i+h) cos(angle_i) + x_i sin(angle_i)

    ``scaling``: ``Linear``, ``NTK``, ``YaRN`` or ``Llama3`` (:mod:`ring_attn_core.model.rotary`) change the frequencies of the
    angles. YaRN also multiplies y by its attention factor. The module has no parameters.

    For a float64 x, angles are float64. For other dtypes an angle is an integer, in units of 2**-32 of a full turn, and wraps at
    a full turn. A float32 product of position and frequency could be off by 0.06 rad at a million tokens. The integer is the sum
    of two angles: one for the largest multiple of 1024 up to the position, one for the remainder. At a million tokens this sum is
    off by at most 1.5e-6 rad.

    Raise ValueError if head_dim is odd, or 2 with NTK, if base is at most 1, or if ``scaling`` is neither None nor one of the
    four records above.
    """

    def __init__(self, head_dim: int, base: float = 10000.0, scaling: Scaling | None = None) -> None:
        super().__init__()
        self.head_dim, self.rotary = as_number(head_dim), Rotary(base, scaling)
        check_rotary(self.head_dim, self.rotary)

    def forward(self, x: Tensor, positions: Tensor | Turns) -> Tensor:
        """Rotate x [b s h head_dim] by the global positions of its tokens, int [s] or [b s]; return a tensor like x.

        The functions ``positions`` and ``shard_batch`` return such positions. Raise ValueError if x has another shape, or if
        ``positions`` are not integers or do not match x's tokens. Layers may pass the Turns at the positions instead.
        """
        turns = positions if isinstance(positions, Turns) else turns_at(positions, self, x.dtype)
        return turns.of(x)


def shares_turns(embedding: nn.Module | None) -> TypeGuard[RotaryEmbedding]:
    """Return True if ``embedding`` has the forward of RotaryEmbedding, which takes Turns; a user's own takes positions only."""
    if not isinstance(embedding, RotaryEmbedding) or "forward" in embedding.__dict__:
        return False
    return type(embedding).forward is RotaryEmbedding.forward


def turns_at(positions: Tensor, embedding: RotaryEmbedding, dtype: torch.dtype) -> Turns:
    """Return the Turns at global positions, int [s] or [b s], with the attention factor, in float32 (float64 if ``dtype`` is)."""
    if not isinstance(positions, Tensor):
        raise ValueError(f"positions must be a torch.Tensor, got {in_words(positions)}")
    if positions.dtype.is_floating_point or positions.dtype == torch.bool:
        raise ValueError(f"positions must be integers, got {positions.dtype}: rounded ones would turn by wrong angles")
    rotary, head_dim, dtype = embedding.rotary, embedding.head_dim, accumulation_dtype(dtype)
    pair = torch.arange(head_dim // 2, dtype=torch.float64, device=positions.device)
    frequencies = inverse_frequencies(rotary, head_dim, pair)
    positions = positions.long()[..., None]  # COARSE does not fit in int8
    if dtype == torch.float64:
        angles = positions * frequencies
    else:
        fine, coarse = ((step * frequencies / (2 * pi) % 1 * TURN).round().long() for step in (1, COARSE))
        turned = positions // COARSE * coarse + positions % COARSE * fine
        angles = ((turned + TURN // 2) % TURN - TURN // 2).to(dtype) * (2 * pi / TURN)
    cos, sin = (x * attention_factor(rotary) for x in (angles.cos(), angles.sin()))
    return Turns(torch.cat([cos, cos], -1)[..., None, :], torch.cat([-sin, sin], -1)[..., None, :])
