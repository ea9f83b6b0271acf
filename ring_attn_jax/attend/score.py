"""The parts of a score besides q and k; they stay with the queries."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax

from .dropout import Draw


@partial(
    jax.tree_util.register_dataclass,
    meta_fields=["scale", "softcap", "dropout_rate"],
    data_fields=["extents", "sinks", "alibi_slopes", "dropout_seed"],
)
@dataclass(frozen=True)
class Score:
    """Everything that determines a score besides q and k; a field that is None has no effect.

    ``s_ij = softcap tanh(scale q_i . k_j / softcap) + slope (k_pos - q_pos)`` if query i may see key j.
    """

    scale: float
    softcap: float | None
    dropout_rate: float
    extents: jax.Array | None = None
    """First and end (exclusive) of the key positions that a query may see, int [b s 2]."""
    sinks: jax.Array | None = None
    """Logits in the denominator of each softmax, [h]."""
    alibi_slopes: jax.Array | None = None
    """ALiBi slopes [h]: added once for each position that the key is ahead of the query."""
    dropout_seed: Draw | None = None
