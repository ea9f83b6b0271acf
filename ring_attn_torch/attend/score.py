"""The parameters of dropout and of the scores s_ij, except q and k. They stay with the queries while keys travel."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from ring_attn_core.plan.ring import Rows


class OwnTiles(NamedTuple):
    """The tokens on which a GPU kernel computes the results that this rank needs, by ``OwnRuns`` of the core. ``order`` [n]: the
    index of each in the whole array. ``places`` [s]: for each token of the whole array its index in ``order``, if it has one."""

    rows: Rows
    order: Tensor
    places: Tensor

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        return x.index_select(dim, self.order)

    def put(self, x: Tensor) -> Tensor:
        """Return results [b n ...] of these tokens as those of the whole array [b s ...]."""
        return x.index_select(1, self.places)


class Score(NamedTuple):
    """The parameters of a score and of dropout. A feature whose field is None is off, and so is dropout at rate 0.

    ``s_ij = softcap tanh(scale q_i . k_j / softcap) + slope (k_pos - q_pos)`` if query i may see key j, else -inf. Without
    softcap the first term is ``scale q_i . k_j``.
    """

    scale: float
    softcap: float | None
    dropout_rate: float
    extents: Tensor | None = None
    """int [b s 2]: the first and the end (exclusive) of the key positions (or local indices) that a query may see."""
    sinks: Tensor | None = None
    """[h]: one more logit, without a value, in the softmax denominator of each query."""
    alibi_slopes: Tensor | None = None
    """[h]: the ALiBi slopes, multiplied by ``k_pos - q_pos`` and added to the score."""
    dropout_seed: Tensor | None = None
    """int64 [4]: lower and upper 32 bits of the dropout seed, global indices of the first batch row and the first head."""
    own_queries: np.ndarray | None = None
    own_keys: np.ndarray | None = None
    """bool [s] and [t]: the tokens whose results this rank needs. A pair of tiles without one is skipped. None: all."""
    query_tiles: OwnTiles | None = None
    key_tiles: OwnTiles | None = None
    """The same for kernels. None: all tokens, by the rows of the step."""

    def of_heads(self, first: int, heads: int) -> Score:
        """Return the parameters of ``heads`` of the query heads, from ``first`` on."""
        cut = lambda x: None if x is None else x[first : first + heads]
        seed = self.dropout_seed
        if seed is not None:
            seed = seed.clone()
            seed[3] += first
        return self._replace(sinks=cut(self.sinks), alibi_slopes=cut(self.alibi_slopes), dropout_seed=seed)
