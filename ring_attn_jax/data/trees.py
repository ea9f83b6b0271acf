"""Prefix trees: their key extents (the queries that may see each key), and the packing and unpacking of rollouts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ring_attn_core.data import rollouts as packing
from ring_attn_core.data import trees
from ring_attn_core.data.rollouts import Rollouts
from ring_attn_core.data.trees import TreeExtents
from ring_attn_core.plan.balanced_layout import BalancedLayout
from ring_attn_core.validation import in_words

from ..attend.tiles import accumulation_dtype
from ..axes import checks_are_off, ring_size, without_derivative
from ..call.traced import TracedLayout
from .extents import whole
from .gather import gather

if TYPE_CHECKING:
    from collections.abc import Sequence

    Row = Sequence[int]

ARRAYS = "ids", "labels", "label_weights", "positions", "predictors"
"""The fields of Rollouts that are arrays, and thus leaves of the pytree."""

OTHERWISE = "leave layout out and pass whole rows in natural order, of from_layout(values, layout, ranks, length)"

jax.tree_util.register_dataclass(Rollouts, ARRAYS, ("counts", "parents", "lengths"))


def tree_extents(parents: Row | Sequence[Row], lengths: Row | Sequence[Row]) -> TreeExtents:
    """Return ``key_extents`` int32 [batch, tokens, 2] and ``positions`` int32 [batch, tokens] of prefix trees.

    ``parents``, ``lengths``: for one row a list of ints, for several rows a list of such lists. The segments of a row are in
    depth-first order. ``parents`` holds the index of each segment's parent in the row, and ``lengths`` each segment's number of
    tokens. A parent of -1 begins a tree; a row may hold several trees.

    The queries [j, end) may see key j; ``end`` is the end of the subtree of the segment that holds key j. So under
    ``mask=causal()`` a token sees only itself and its ancestors. Positions count along the path from the root, for rotary
    embeddings. Shorter rows are padded with key extents (0, 0) and positions 0. Both arrays describe whole rows;
    :func:`to_layout` shards them.

    Raise ValueError if the arguments are not such lists or do not match, if a parent comes after its child, if segments are not
    in depth-first order, or if a segment is empty.
    """
    return TreeExtents(*map(jnp.asarray, trees.tree_extents(parents, lengths)))


def pack_rollouts(
    rollouts: Sequence[Any],
    *,
    loss_masks: Sequence[Any] | None = None,
    weights: Sequence[Any] | None = None,
    length: int | None = None,
) -> Rollouts:
    """Pack rollouts (token lists) into rows of prefix trees, so that the tokens of a shared prefix are computed once.

    Each slot (one index of a row) holds one token and its label, which is the next token. A shared token that different tokens
    follow is repeated: it takes one slot for each different label.

    ``rollouts``: lists or integer arrays [tokens], prompt and completion together. ``loss_masks``: for each rollout a list with
    True for each token that counts in the loss; None: all count. ``weights``: for each rollout one number, or a list with one
    number per token, of any sign; None: 1. No token predicts the first token of a rollout, so the mask and weight of that token
    have no effect.

    The sum over all slots of ``label_weights`` times the cross-entropy of ``labels`` is the weighted loss of all rollouts
    computed one by one. The label of a slot is -100 if no rollout counts the next token in the loss; a token that counts with
    weight 0 stays a label. Labels are shifted already: do not shift them again.

    ``length``: the maximum number of tokens of a row, or None for one row. A tree that does not fit into the rest of a row is
    split between two rollouts, and another row repeats their shared prefix. In the result, ids and labels are int32.
    ``saved_tokens`` is the number of tokens that need not be computed, because rollouts share them. The returned Rollouts is a
    pytree with its array fields as leaves. A jitted function that takes it is recompiled for each different tree.

    Raise ValueError if a rollout is empty, is not a list of token ids, or is longer than ``length``, or if masks or weights do
    not fit the rollouts.
    """
    packed = packing.pack_rollouts(rollouts, loss_masks, weights, length)
    arrays = {name: jnp.asarray(getattr(packed, name)) for name in ARRAYS if name != "predictors"}
    return replace(packed, **arrays)  # predictors stay in numpy: a shard_map over Explicit axes may close over them


def unpack_rollouts(
    values: jax.Array, rollouts: Rollouts, *, axis_name: str = "seq", layout: str | BalancedLayout | TracedLayout | None = None
) -> list[jax.Array]:
    """Return for each rollout the values [tokens - 1, ...] at the slots that predict its tokens, on every rank.

    No slot predicts the first token of a rollout. ``values``: one value per slot, [rows, tokens, ...], such as
    :func:`token_log_probs` of ``rollouts.labels``. Without ``layout``, pass whole rows. With ``layout`` (as in :func:`gather`),
    pass this rank's shard of the rows and call inside ``jax.shard_map`` over ``axis_name``. Loss masks are not applied: masked
    tokens have values too.

    Differentiable: the gradient of a value is the sum over the rollouts that share the value, in at least float32. With
    ``layout`` each rank keeps the gradient of its own shard, without a sum over ranks. JAX treats the result as replicated, so a
    loss that every rank computes from it counts once, not once per rank. Under ``check_vma=False`` JAX does not track the
    replication: a gradient with ``layout`` and several ranks then raises ValueError.

    Raise ValueError if ``values`` do not have the shape of the rollouts, or if ``layout`` is passed outside a shard_map.
    """
    if not hasattr(values, "shape") or not hasattr(values, "dtype"):
        raise ValueError(f"values must be an array, whole or this rank's shard, got {in_words(values)}")
    ranks = 1 if layout is None else ring_size(axis_name, "unpack_rollouts", OTHERWISE)
    packing.check_values(values.shape, rollouts, layout, ranks)
    floating = jnp.issubdtype(values.dtype, jnp.floating)
    wide = values.astype(accumulation_dtype(values.dtype)) if floating else values
    if layout is not None:
        if ranks > 1 and checks_are_off(axis_name):
            wide = without_derivative("unpack_rollouts", wide)
        wide = gather(wide, axis_name=axis_name, layout=layout, length=rollouts.ids.shape[1])
    flat = whole(whole(wide, 0), 1).reshape(rollouts.ids.size, *values.shape[2:])
    predicted = jnp.take(flat, rollouts.predictors, axis=0).astype(values.dtype)
    return jnp.split(predicted, np.cumsum(rollouts.counts[:-1]).tolist())
