"""What makes a score of q . k besides q and k, and who computes it: everything of a call that stays on its rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ring_attn_core.dropout import (
    WORD,
    check_draw,
    number,
    philox2x32,
    place_of_key,
    place_of_query,
    seed_words,
    stream,
    threshold,
)
from ring_attn_core.kernels.calls import Call

State = tuple[Tensor, Tensor]
"""(out [b s h e], lse [b s h]) over the keys seen so far."""

Gradients = Tensor | tuple[Tensor, ...]
"""Of keys: dkv packed like k and v, or dk and dv where they are apart."""


class Cotangents(NamedTuple):
    """What every step of the backward needs of the queries: q [b s h d], dout [b s h e], and of their sums what the backend uses.

    ``lse``, ``delta``: [b s h]; for kernels [b h s], lse in base 2. ``bounds``: of the extents of a kernel's query tiles.
    ``out`` [b s h e]: for a vendor's backend.
    """

    q: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor
    bounds: Tensor | None = None
    out: Tensor | None = None


@dataclass(frozen=True)
class Score:
    """``s_ij = softcap tanh(scale q_i . k_j / softcap) + slope (k_pos - q_pos)`` where query i may see key j; None: left out."""

    scale: float
    softcap: float | None
    dropout_rate: float
    call: Call | None = None
    """What kernels are launched with; None: the blockwise backend computes."""
    vendor: str | None = None
    """Whose kernels compute instead: "flash", "flash4" or "cudnn"."""
    blanks: bool = True
    """Some query, padding included, may see nothing."""
    extents: Tensor | None = None
    """int [b s 2]: first and end (exclusive) of the key positions that a query may see."""
    sinks: Tensor | None = None
    """[h]: logits in every softmax's denominator."""
    slopes: Tensor | None = None
    """[h]: what ALiBi adds for each position that the key is ahead of the query."""
    draw: Tensor | None = None
    """int64 [4]: lower and upper word of the dropout seed, global index of the first batch row and of the first head."""


def draw_of(seed: Any, offset: Any, device: torch.device) -> Tensor:
    """The ``draw`` of a Score, made on the device, since a copy of it would wait for that; ValueError for no 0-d integer."""
    if not isinstance(offset, tuple | list) or len(offset) != 2:
        raise ValueError(
            f"dropout_offset is a pair, the global index of the first batch row and of the first head, got {offset!r}"
        )
    for name, x in (("dropout_seed", seed), ("dropout_offset[0]", offset[0]), ("dropout_offset[1]", offset[1])):
        if not (_is_integer(x) if isinstance(x, Tensor) else isinstance(x, int | np.integer)) or x is True:
            raise ValueError(f"{name} must be an int or a 0-d integer tensor, got {x!r}")
    given = [int(x) if isinstance(x, np.integer) else x for x in (seed, *offset)]
    check_draw(*given)
    as_tensor = lambda x: (
        x.to(device, torch.int64) if isinstance(x, Tensor) else torch.full((), x, dtype=torch.int64, device=device)
    )
    seed, first_batch, first_head = map(as_tensor, given)
    return torch.stack([*seed_words(seed), first_batch, first_head])


def _is_integer(x: Tensor) -> bool:
    return x.ndim == 0 and not (x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool)


def streams(draw: Tensor, batch: int, heads: int) -> Tensor:
    """int64 [batch, heads]: the key by which dropout draws for each, once a call."""
    low, high, first_batch, first_head = draw.unbind()
    b = (first_batch + torch.arange(batch, device=draw.device) & WORD)[:, None]
    h = first_head + torch.arange(heads, device=draw.device) & WORD
    return stream((low, high), b, h, _multiply)


def kept(streams: Tensor, rate: float, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """bool [batch, heads, queries, keys]: which probabilities dropout keeps, from global positions [queries] and [keys]."""
    (of_q, which), (of_k, turn) = place_of_query(q_pos[:, None]), place_of_key(k_pos)
    words = philox2x32((of_q, of_k), streams[:, :, None, None], _multiply)
    return number(torch.where(which == 0, *words), turn) >= threshold(rate)


def _multiply(a: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """Upper and lower 32 bits of the product, in int64, where it wraps to the right bits."""
    product = a * constant
    return (product >> 32) & WORD, product & WORD
