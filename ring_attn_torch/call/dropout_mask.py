"""The dropout mask of a ``ring_attention`` call as an array, to compare it with another implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ring_attn_core.problem.checks import check_dropout_rate, check_mask_sizes

from ..attend.dropout import Dropout, dropout_state, keep_mask, philox_keys

if TYPE_CHECKING:
    from jaxtyping import Bool, Int


def dropout_mask(
    q_positions: Int[Tensor, " queries"],
    k_positions: Int[Tensor, " keys"],
    *,
    batch: int,
    heads: int,
    dropout_rate: float,
    dropout_seed: Any,
    dropout_offset: tuple[Any, Any] = (0, 0),
) -> Bool[Tensor, "batch heads queries keys"]:
    """Return the dropout mask of :func:`ring_attention`, bool [batch, heads, queries, keys]; True keeps a probability.

    Kept probabilities are divided by 1 - rate, with the rate rounded to a multiple of 2^-16.

    ``q_positions``, ``k_positions``: global token positions of the queries and keys, not checked. ``heads``: query heads.
    ``dropout_rate``, ``dropout_seed``, ``dropout_offset``: as in :func:`ring_attention`, but not None. The random bits are
    Philox2x32-7 of seed, batch row, head, query position and key position, the same on any ring and in either framework. The mask
    has an entry for each score, so use it for short sequences, as in a test. Raise ValueError if positions are not 1-D, or if
    another argument is out of its range.
    """
    check_dropout_rate(dropout_rate)
    of_q, of_k = torch.as_tensor(q_positions).long(), torch.as_tensor(k_positions).long()
    check_mask_sizes(batch, heads, of_q.ndim, of_k.ndim)
    keys = philox_keys(dropout_state(Dropout(dropout_seed, dropout_offset), of_q.device), batch, heads)
    return keep_mask(keys, dropout_rate, of_q, of_k.to(of_q.device))
