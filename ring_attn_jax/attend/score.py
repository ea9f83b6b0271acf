"""What makes a score of q . k besides q and k."""

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
    """``s_ij = softcap tanh(scale q_i . k_j / softcap) + slope (k_pos - q_pos)`` where query i may see key j; None: left out."""

    scale: float
    softcap: float | None
    dropout_rate: float
    extents: jax.Array | None = None
    """int [b s 2]: first and end (exclusive) of the key positions that a query may see."""
    sinks: jax.Array | None = None
    """[h]: logits in every softmax's denominator."""
    alibi_slopes: jax.Array | None = None
    """[h]: what ALiBi adds for each position that the key is ahead of the query."""
    dropout_seed: Draw | None = None
