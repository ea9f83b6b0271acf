"""What makes a score of q . k besides q and k."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Score(NamedTuple):
    """``s_ij = softcap tanh(scale q_i . k_j / softcap) + slope (k_pos - q_pos)`` where query i may see key j; None: left out."""

    scale: float
    softcap: float | None
    dropout_rate: float
    extents: Tensor | None = None
    """int [b s 2]: first and end (exclusive) of the key positions that a query may see."""
    sinks: Tensor | None = None
    """[h]: logits in every softmax's denominator."""
    alibi_slopes: Tensor | None = None
    """[h]: what ALiBi adds for each position that the key is ahead of the query."""
    dropout_seed: Tensor | None = None
    """int64 [4]: lower and upper word of the dropout seed, global index of the first batch row and of the first head."""
