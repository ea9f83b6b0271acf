"""The parameters of dropout and of the scores s_ij, except q and k. They stay with the queries while keys travel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax

from .dropout import DropoutState


@partial(
    jax.tree_util.register_dataclass,
    meta_fields=["scale", "softcap", "dropout_rate"],
    data_fields=["extents", "sinks", "alibi_slopes", "dropout_seed", "positions", "step_positions"],
)
@dataclass(frozen=True)
class Score:
    """The parameters of a score and of dropout. A feature whose field is None is off, and so is dropout at rate 0.

    ``s_ij = softcap tanh(scale q_i . k_j / softcap) + slope (k_pos - q_pos)`` if query i may see key j, else -inf. Without
    softcap the first term is ``scale q_i . k_j``.
    """

    scale: float
    softcap: float | None
    dropout_rate: float
    extents: jax.Array | None = None
    """int [b s 2]: the first and the end (exclusive) of the key positions (or local indices) that a query may see."""
    sinks: jax.Array | None = None
    """[h]: one more logit, without a value, in the softmax denominator of each query."""
    alibi_slopes: jax.Array | None = None
    """[h]: the ALiBi slopes, multiplied by ``k_pos - q_pos`` and added to the score."""
    dropout_seed: DropoutState | None = None
    positions: jax.Array | None = None
    """int32 [ranks * s]: the position of each token of a traced layout, in layout order; ``BEYOND`` (2^30) at padding."""
    step_positions: tuple[jax.Array, jax.Array] | None = None
    """int32 [s] and [t]: in a traced layout the positions of a step's queries and keys; the step's rows hold local indices."""
