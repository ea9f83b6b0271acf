"""Sharding of a global batch of token ids, with labels, positions, extents and key mask."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ring_attn_core.data.layout_check import check_labels
from ring_attn_core.data.sharding import check_arguments, check_key_mask, check_shape, make_layout
from ring_attn_core.data.trees import batch_of_trees, longest_path, trees_of
from ring_attn_core.plan.balanced_layout import BalancedLayout

from .extents import convert, document_extents, integers, on_host
from .layout import _order, positions, to_layout

if TYPE_CHECKING:
    from jaxtyping import Bool, Int


class Shard(NamedTuple):
    """A shard of a batch, as ``shard_batch`` returns it. Each array is in layout order along dimension 1."""

    ids: Tensor
    """int [batch, tokens]: token ids, 0 in padded slots."""
    labels: Tensor
    """int [batch, tokens]: the target of each token; ``ignore_index`` without a target and in padded slots."""
    positions: Tensor
    """int32 [batch, tokens]: positions for rotary embeddings: global, within the document, or along a tree's path."""
    extents: Tensor | None
    """int32 [batch, tokens, 2]: first and end position of each query's document; [0, 0) in padding. None without documents."""
    key_mask: Tensor | None
    """bool [batch, tokens]: True if queries may attend to the key; False in padded slots. None if no mask was passed."""
    length: int
    """The true global number of tokens, for ``ring_attention(..., length=length)``."""
    key_extents: Tensor | None = None
    """int32 [batch, tokens, 2]: first and end of the queries that may see a key; [0, 0) in padded slots. None without trees."""
    layout: BalancedLayout | None = None
    """The balanced layout, for ``ring_attention(..., layout=layout)``; None for a named layout."""
    longest_path: int | None = None
    """The number of tokens of the longest path from a root, for layers with a window. None without trees."""
    batch_labels: Tensor | None = None
    """int, 0-d: the number of labels, at least 1, of this microbatch's whole global batch. None without ``batch_tokens``."""


def shard_batch(
    ids: Int[Tensor, "batch length"],
    layout: str | BalancedLayout,
    ranks: int,
    rank: int | None = None,
    *,
    labels: Int[Tensor, "batch length"] | None = None,
    documents: Int[Tensor, "batch length"] | None = None,
    tree: tuple[Any, Any] | None = None,
    key_mask: Bool[Tensor, "batch length"] | None = None,
    ignore_index: int = -100,
    restart_positions: bool = False,
) -> Shard:
    """Return the shard of ``rank`` of token ids [batch, length], or the shards of all ranks side by side if ``rank`` is None.

    ``labels`` [batch, length]: the target of each token. None: the next token of the same document, shifted *before* sharding, so
    that the last token of a shard has the right label. ``documents`` [batch, length]: the document id of each token, as
    in :func:`document_extents`. ``tree``: (parents, lengths) of prefix trees, as in :func:`tree_extents`; the default labels then
    stay within segments, and positions count along the path from the root. ``key_mask`` [batch, length]: True if queries may
    attend to the key.

    A token is padding if its document id is negative or its key_mask False. The label of padding is ``ignore_index``, even if
    ``labels`` gives another; all other labels in ``labels`` stay. The default labels never make padding the target of a token.
    ``restart_positions``: count positions from 0 in each document. Tokens with a negative document id, and slots that the layout
    pads, keep their global position. The positions are [batch, tokens], since rows may differ, while the function
    :func:`positions` returns [tokens].

    ``layout``: a name, or the field ``.layout`` of another shard. "balanced" distributes ``documents`` or ``tree`` so that all
    ranks have nearly equal work under a causal mask. The field ``.layout`` of the result then holds the layout: pass it on, as in
    ``ring_attention(..., layout=shard.layout)``.

    Do not append new tokens to a zigzag or contiguous shard: positions depend on the layout and the length, so attention would
    silently be wrong. Append only to ``"striped"`` shards without padding (see :func:`to_layout`).

    Raise ValueError if an argument does not fit, if restart_positions is set without documents, if documents and a tree are both
    passed, if torch.compile traces documents in the layout "balanced", or if :func:`document_extents` or :func:`tree_extents`
    refuses its argument.
    """
    check_arguments(rank, ranks, ignore_index, documents is not None, tree is not None, restart_positions)
    ids = integers("ids", ids, "batch", "length")
    owner, extents = torch.zeros_like(ids), None  # the document of each token, negative for padding
    if documents is not None:
        owner = _check_shaped_like(ids, documents=integers("documents", documents, "batch", "length"))
        extents = document_extents(owner)
    key_extents = path_positions = longest = None
    if tree is not None:
        key_extents, path_positions, owner = (torch.from_numpy(x).to(ids.device) for x in batch_of_trees(tree, *ids.shape))
        longest = longest_path(trees_of(*tree))
    layout = make_layout(layout, ranks, ids.shape[1], tree, partial(on_host, owner))
    if key_mask is not None:
        key_mask = convert("key_mask", key_mask)
        check_key_mask(key_mask.dtype == torch.bool, key_mask.dtype)
        key_mask = _check_shaped_like(ids, key_mask=key_mask)
        owner = torch.where(key_mask, owner, -1)
    given = labels is not None and documents is not None
    if labels is None:
        labels = torch.where(_next(owner, -1) == owner, _next(ids, ignore_index), ignore_index)
    labels = _check_shaped_like(ids, labels=integers("labels", labels, "batch", "length"))
    if given:
        check_labels(on_host(labels), on_host(ids), on_host(owner))
    labels = torch.where(owner < 0, ignore_index, labels)

    def shard(x: Tensor, padding: int = 0) -> Tensor:
        x = to_layout(x, layout, ranks, pad_value=padding)
        return x if rank is None else x.chunk(ranks, 1)[rank].contiguous()  # a view would keep the global batch alive

    dealt = layout if isinstance(layout, BalancedLayout) else None
    own = _order(layout, ranks, ids.shape[1]) if rank is None else positions(layout, ranks, ids.shape[1], rank)
    where = own.to(ids.device).repeat(ids.shape[0], 1)
    extents, key_extents, key_mask = (None if x is None else shard(x) for x in (extents, key_extents, key_mask))
    if restart_positions and extents is not None:
        where = where - extents[..., 0]
    if path_positions is not None:
        where = shard(path_positions)
    return Shard(shard(ids), shard(labels, ignore_index), where, extents, key_mask, ids.shape[1], key_extents, dealt, longest)


def _check_shaped_like(ids: Tensor, **array: Tensor) -> Tensor:
    ((name, x),) = array.items()
    check_shape(name, tuple(x.shape), tuple(ids.shape))
    return x


def _next(x: Tensor, last: int) -> Tensor:
    return torch.cat([x[:, 1:], torch.full_like(x[:, :1], last)], 1)
