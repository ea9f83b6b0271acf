"""A batch of token ids as one rank's shard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ring_attn_core.layouts import check_rank
from ring_attn_core.problem.checks import check_number

from .extents import converted, document_extents, integers
from .layout import _order, positions, to_layout

if TYPE_CHECKING:
    from jaxtyping import Bool, Int


class Shard(NamedTuple):
    """What ``shard_batch`` returns; every array is in layout order along dimension 1."""

    ids: Tensor
    """int [batch, tokens]: token ids, 0 in padded slots."""
    labels: Tensor
    """int [batch, tokens]: what each token should predict, ``ignore_index`` where there is nothing and in padded slots."""
    positions: Tensor
    """int32 [batch, tokens]: for rotary embeddings; global, or counted from the first token of the document."""
    extents: Tensor | None
    """int32 [batch, tokens, 2]: what each query may see, its document; [0, 0) in padded slots. None without documents."""
    key_mask: Tensor | None
    """bool [batch, tokens]: which keys may be attended, False in padded slots. None where none was given."""
    length: int
    """The true global number of tokens, for ``ring_attention(..., length=length)``."""


def shard_batch(
    ids: Int[Tensor, "batch length"],
    layout: str,
    ranks: int,
    rank: int | None = None,
    *,
    labels: Int[Tensor, "batch length"] | None = None,
    documents: Int[Tensor, "batch length"] | None = None,
    key_mask: Bool[Tensor, "batch length"] | None = None,
    ignore_index: int = -100,
    restart_positions: bool = False,
) -> Shard:
    """Token ids [batch, length] of whole sequences -> the shard of ``rank``, or all shards in layout order where it is None.

    ``labels`` [batch, length]: what each token should predict. None: the next token of the same document, found *before*
    sharding, so that the label of a shard's last token is right. ``documents`` [batch, length]: the document of every token,
    what :func:`document_extents` takes. ``key_mask`` [batch, length]: True where a key may be attended.

    A token of a negative document, or whose key_mask is False, is padding: it has no label, not even a given one, and no token
    is to predict it; given labels of other tokens stay. ``restart_positions``: positions count from 0 in every document; tokens
    of negative documents and padded slots keep their global position. They are [batch, tokens], since rows may differ, where
    :func:`positions` returns [tokens].

    Do not append new tokens to a zigzag or contiguous shard: positions follow from the layout and the new length, so attention
    would silently be wrong. Only a ``"striped"`` shard without padding may be continued (see :func:`to_layout`).

    Raises ValueError for shapes and dtypes that do not fit, for restart_positions without documents, and for documents that
    :func:`document_extents` refuses.
    """
    if rank is not None:
        check_rank(rank, ranks)
    check_number("ignore_index", ignore_index)
    ids = integers("ids", ids, "batch", "length")
    owner, extents = torch.zeros_like(ids), None  # the document of every token, negative where it is padding
    if documents is not None:
        owner = _shaped_like(ids, documents=integers("documents", documents, "batch", "length"))
        extents = document_extents(owner)
    elif restart_positions:
        raise ValueError("restart_positions=True counts positions from the start of each document: pass documents=...")
    if key_mask is not None:
        key_mask = _shaped_like(ids, key_mask=_boolean(key_mask))
        owner = torch.where(key_mask, owner, -1)
    if labels is None:
        labels = torch.where(_next(owner, -1) == owner, _next(ids, ignore_index), ignore_index)
    labels = _shaped_like(ids, labels=integers("labels", labels, "batch", "length"))
    labels = torch.where(owner < 0, ignore_index, labels)

    def shard(x: Tensor, padding: int = 0) -> Tensor:
        x = to_layout(x, layout, ranks, pad_value=padding)
        return x if rank is None else x.chunk(ranks, 1)[rank].contiguous()  # a view would keep the whole batch alive

    own = _order(layout, ranks, ids.shape[1]) if rank is None else positions(layout, ranks, ids.shape[1], rank)
    where = own.to(ids.device).repeat(ids.shape[0], 1)
    extents, key_mask = (None if x is None else shard(x) for x in (extents, key_mask))
    if restart_positions and extents is not None:
        where = where - extents[..., 0]
    return Shard(shard(ids), shard(labels, ignore_index), where, extents, key_mask, ids.shape[1])


def _shaped_like(ids: Tensor, **given: Tensor) -> Tensor:
    ((name, x),) = given.items()
    if x.shape != ids.shape:
        raise ValueError(f"{name} must have the shape of ids {list(ids.shape)}, got {list(x.shape)}")
    return x


def _boolean(key_mask: Any) -> Tensor:
    key_mask = converted("key_mask", key_mask)
    if key_mask.dtype != torch.bool:
        raise ValueError(
            f"key_mask must be bool, True where a key may be attended, got {key_mask.dtype}: pass key_mask != 0 for zeros and "
            "ones, key_mask == 0 for an additive mask (0 and -inf)"
        )
    return key_mask


def _next(x: Tensor, last: int) -> Tensor:
    """What stands after each token of ``x`` [batch, length], ``last`` after the last."""
    return torch.cat([x[:, 1:], torch.full_like(x[:, :1], last)], 1)
