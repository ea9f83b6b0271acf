"""Sharding of a global batch of token ids, with labels, positions, extents and key mask."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import GetAttrKey, register_pytree_with_keys

from ring_attn_core.data.layout_check import check_labels
from ring_attn_core.data.sharding import check_arguments, check_key_mask, check_shape, make_layout
from ring_attn_core.data.trees import batch_of_trees, longest_path, trees_of
from ring_attn_core.layouts import ShardLength
from ring_attn_core.plan.balanced_layout import BalancedLayout

from .extents import convert, document_extents, integers, on_host, whole
from .layout import _order, positions, to_layout

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int


class Shard(NamedTuple):
    """A shard of a batch, as ``shard_batch`` returns it. Each array is in layout order along dimension 1.

    A shard is a pytree: the arrays are its leaves, and length, layout and longest_path are static. So a jitted function may take
    a shard as an argument.
    """

    ids: jax.Array
    """int [batch, tokens]: token ids, 0 in padded slots."""
    labels: jax.Array
    """int [batch, tokens]: the target of each token; ``ignore_index`` without a target and in padded slots."""
    positions: jax.Array
    """int32 [batch, tokens]: positions for rotary embeddings: global, within the document, or along a tree's path."""
    extents: jax.Array | None
    """int32 [batch, tokens, 2]: first and end position of each query's document; [0, 0) in padding. None without documents."""
    key_mask: jax.Array | None
    """bool [batch, tokens]: True if queries may attend to the key; False in padded slots. None if no mask was passed."""
    length: int
    """The true global number of tokens, for ``ring_attention(..., length=length)``, with the layout and ranks of this shard."""
    key_extents: jax.Array | None = None
    """int32 [batch, tokens, 2]: first and end of the queries that may see a key; [0, 0) in padded slots. None without trees."""
    layout: BalancedLayout | None = None
    """The balanced layout, for ``ring_attention(..., layout=layout)``; None for a named layout."""
    longest_path: int | None = None
    """The number of tokens of the longest path from a root, for layers with a window. None without trees."""
    batch_labels: jax.Array | None = None
    """int, 0-d: the number of labels, at least 1, of this microbatch's whole global batch. None without ``batch_tokens``."""


ARRAYS = ("ids", "labels", "positions", "extents", "key_mask", "key_extents", "batch_labels")
STATIC = ("length", "layout", "longest_path")


def _flat(shard: Shard) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
    return [(GetAttrKey(name), getattr(shard, name)) for name in ARRAYS], tuple(getattr(shard, name) for name in STATIC)


def _of_flat(static: tuple[Any, ...], arrays: Iterable[Any]) -> Shard:
    return Shard(**dict(zip(ARRAYS, arrays, strict=True)), **dict(zip(STATIC, static, strict=True)))


register_pytree_with_keys(Shard, _flat, _of_flat)


def shard_batch(
    ids: Int[Array, "batch length"],
    layout: str | BalancedLayout,
    ranks: int,
    rank: int | jax.Array | None = None,
    *,
    labels: Int[Array, "batch length"] | None = None,
    documents: Int[Array, "batch length"] | None = None,
    tree: tuple[Any, Any] | None = None,
    key_mask: Bool[Array, "batch length"] | None = None,
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
    passed, if documents are traced in the layout "balanced", or if :func:`document_extents` or :func:`tree_extents` refuses its
    argument.
    """
    check_arguments(rank, ranks, ignore_index, documents is not None, tree is not None, restart_positions)
    ids = whole(integers("ids", ids, "batch", "length"), 1)
    owner, extents = jnp.zeros_like(ids), None  # the document of each token, negative for padding
    if documents is not None:
        owner = _check_shaped_like(ids, documents=integers("documents", documents, "batch", "length"))
        extents = document_extents(owner)
    key_extents = path_positions = longest = None
    if tree is not None:
        key_extents, path_positions, owner = map(jnp.asarray, batch_of_trees(tree, *ids.shape))
        longest = longest_path(trees_of(*tree))
    layout = make_layout(layout, ranks, ids.shape[1], tree, partial(on_host, owner))
    if key_mask is not None:
        key_mask = convert("key_mask", key_mask)
        check_key_mask(key_mask.dtype == bool, key_mask.dtype)
        key_mask = _check_shaped_like(ids, key_mask=key_mask)
        owner = jnp.where(key_mask, owner, -1)
    given = labels is not None and documents is not None
    if labels is None:
        labels = jnp.where(_next(owner, -1) == owner, _next(ids, ignore_index), ignore_index)
    labels = _check_shaped_like(ids, labels=integers("labels", labels, "batch", "length"))
    if given:
        check_labels(on_host(labels), on_host(ids), on_host(owner))
    labels = jnp.where(owner < 0, ignore_index, labels)

    def shard(x: jax.Array, padding: int = 0) -> jax.Array:
        x = to_layout(x, layout, ranks, pad_value=padding)
        return x if rank is None else jnp.stack(jnp.split(x, ranks, 1))[rank]

    length = ShardLength(ids.shape[1], layout, ranks)
    dealt = layout if isinstance(layout, BalancedLayout) else None
    own = _order(layout, ranks, ids.shape[1]) if rank is None else positions(layout, ranks, ids.shape[1], rank)
    where = jnp.broadcast_to(own, (ids.shape[0], len(own)))
    extents, key_extents, key_mask = (None if x is None else shard(x) for x in (extents, key_extents, key_mask))
    if restart_positions and extents is not None:
        where = where - extents[..., 0]
    if path_positions is not None:
        where = shard(path_positions)
    return Shard(shard(ids), shard(labels, ignore_index), where, extents, key_mask, length, key_extents, dealt, longest)


def _check_shaped_like(ids: jax.Array, **array: jax.Array) -> jax.Array:
    ((name, x),) = array.items()
    check_shape(name, tuple(x.shape), tuple(ids.shape))
    return whole(x, 1)


def _next(x: jax.Array, last: int) -> jax.Array:
    """Shift each row of ``x`` [batch, length] left by one token, and put ``last`` at the end of the row."""
    return jnp.concatenate([x[:, 1:], jnp.full_like(x[:, :1], last)], 1)
