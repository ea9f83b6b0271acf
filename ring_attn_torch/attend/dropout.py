"""Dropout's random numbers in PyTorch: one Philox key per batch row and head, the keep mask, and a call's mask.

The algorithm is in ``dropout.py`` of the core.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ring_attn_core.dropout import (
    WORD,
    check_seed,
    number,
    philox2x32,
    philox_key,
    place_of_key,
    place_of_query,
    seed_words,
    threshold,
)
from ring_attn_core.problem.checks import check_dropout_rate, check_mask_sizes

if TYPE_CHECKING:
    from jaxtyping import Bool, Int


class Dropout(NamedTuple):
    """``dropout_seed`` and ``dropout_offset`` as the user passed them."""

    seed: int | Tensor
    offset: tuple[int | Tensor, int | Tensor] = (0, 0)

    @property
    def known_offset(self) -> tuple[int, int]:
        """Return the offset as ints, to compare it between ranks. Replace a tensor by -1: reading it may wait for the device."""
        batch, head = (-1 if isinstance(x, Tensor) else int(x) for x in self.offset)
        return batch, head


def dropout_state(dropout: Dropout, device: torch.device) -> Tensor:
    """Return the dropout state, int64 [4]: the lower and upper 32 bits of the seed, the global indices of the first batch row and
    head. Build it on the device, because a copy from the host would wait for the device."""
    seed, offset = dropout
    if not isinstance(offset, tuple | list) or len(offset) != 2:
        raise ValueError(
            f"dropout_offset is a pair, the global index of the first batch row and of the first head, got {offset!r}"
        )
    for name, x in (("dropout_seed", seed), ("dropout_offset[0]", offset[0]), ("dropout_offset[1]", offset[1])):
        if not (_is_integer(x) if isinstance(x, Tensor) else isinstance(x, int | np.integer)) or isinstance(x, bool):
            raise ValueError(f"{name} must be an int or a 0-d integer tensor, got {x!r}")
    values = [int(x) if isinstance(x, np.integer) else x for x in (seed, *offset)]
    check_seed(*values)
    as_tensor = lambda x: (
        x.to(device, torch.int64) if isinstance(x, Tensor) else torch.full((), x, dtype=torch.int64, device=device)
    )
    seed, first_batch, first_head = map(as_tensor, values)
    return torch.stack([*seed_words(seed), first_batch, first_head])


def _is_integer(x: Tensor) -> bool:
    return x.ndim == 0 and not (x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool)


def philox_keys(state: Tensor, batch: int, heads: int) -> Tensor:
    """Return the Philox key of each batch row and head, int64 [batch, heads]. ``state``: the result of ``dropout_state``."""
    low, high, first_batch, first_head = state.unbind()
    b = (first_batch + torch.arange(batch, device=state.device) & WORD)[:, None]
    h = first_head + torch.arange(heads, device=state.device) & WORD
    return philox_key((low, high), b, h, multiply)


def keep_mask(philox_keys: Tensor, rate: float, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """Return dropout's keep mask, bool [batch, heads, queries, keys]. ``q_pos`` [queries], ``k_pos`` [keys]: global positions."""
    (q_at, which), (k_at, turn) = place_of_query(q_pos[:, None]), place_of_key(k_pos)
    words = philox2x32((q_at, k_at), philox_keys[:, :, None, None], multiply)
    return number(torch.where(which == 0, *words), turn) >= threshold(rate)


def multiply(a: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """Return the upper and lower 32 bits of ``a * constant``, right even if the product overflows to a negative int64."""
    product = a * constant
    return (product >> 32) & WORD, product & WORD


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
    q_at, k_at = torch.as_tensor(q_positions).long(), torch.as_tensor(k_positions).long()
    check_mask_sizes(batch, heads, q_at.ndim, k_at.ndim)
    keys = philox_keys(dropout_state(Dropout(dropout_seed, dropout_offset), q_at.device), batch, heads)
    return keep_mask(keys, dropout_rate, q_at, k_at.to(q_at.device))
