"""Rotary position embeddings."""

from __future__ import annotations

from math import pi

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ring_attn_core.model.rotary import check_rotary

from ..attend.tiles import accumulation_dtype

COARSE = 1024
"""Tokens between two coarse angles of RotaryEmbedding."""


class RotaryEmbedding(nnx.Module):
    """Rotary position embedding (Su et al., arXiv:2104.09864, equation 34), pairs in halves as in Llama; no parameters.

        angle_i = position * base ** (-2 i / head_dim)                          0 <= i < head_dim / 2 = h
        y_i     = x_i cos(angle_i) - x_(i+h) sin(angle_i)
        y_(i+h) = x_(i+h) cos(angle_i) + x_i sin(angle_i)

    Angles are float32 whatever x is. A float32 product of position and frequency is off by 0.06 rad at a million tokens, so a
    position is split into a multiple of 1024, whose angle is reduced by whole turns in float64 beforehand, and a rest: 4e-4 rad.

    Raises ValueError for an odd head_dim.
    """

    def __init__(self, head_dim: int, base: float = 10000.0) -> None:
        check_rotary(head_dim, base)
        self.head_dim, self.base = head_dim, float(base)

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """x [b s h head_dim], global positions int [s] or [b s] of its tokens (``positions``, ``shard_batch``) -> like x.

        Raises ValueError for another head_dim, another number of positions, and positions that are no integers.
        """
        self._check(x, positions)
        cos, sin = (t[..., None, :].astype(accumulation_dtype(x.dtype)) for t in self._turns(positions))
        low, high = jnp.split(x.astype(cos.dtype), 2, -1)
        return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1).astype(x.dtype)

    def _turns(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """cos and sin, float32 [b or 1, s, head_dim / 2]."""
        exponents = np.arange(0, self.head_dim, 2) / self.head_dim
        fine = self.base**-exponents
        coarse = np.remainder(COARSE * fine + pi, 2 * pi) - pi
        positions = positions if positions.ndim == 2 else positions[None]
        positions = positions if positions.dtype.itemsize >= 4 else positions.astype(jnp.int32)  # 1024 fits no int8
        quotient, rest = (t[..., None].astype(jnp.float32) for t in (positions // COARSE, positions % COARSE))
        angles = quotient * coarse.astype(np.float32)[None, None] + rest * fine.astype(np.float32)[None, None]
        return jnp.cos(angles), jnp.sin(angles)

    def _check(self, x: jax.Array, positions: jax.Array) -> None:
        if x.ndim != 4 or x.shape[-1] != self.head_dim:
            raise ValueError(f"x must be [batch, tokens, heads, {self.head_dim}], got {list(x.shape)}")
        if not jnp.issubdtype(positions.dtype, jnp.integer):
            raise ValueError(f"positions must be integers, got {positions.dtype}: rounded ones would turn by wrong angles")
        if positions.shape not in (x.shape[1:2], x.shape[:2]):
            expected = f"{list(x.shape[1:2])} or {list(x.shape[:2])}"
            raise ValueError(f"positions of x {list(x.shape)} must be {expected}, got {list(positions.shape)}")
