"""Prefix trees: their key extents (the queries that may see each key), and the packing and unpacking of rollouts."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.data import rollouts as packing
from ring_attn_core.data import trees
from ring_attn_core.data.rollouts import Rollouts
from ring_attn_core.data.trees import TreeExtents
from ring_attn_core.plan.balanced_layout import BalancedLayout
from ring_attn_core.validation import in_words

from ..ring.agreement import AgreedCall, agree_on, refuse
from ..ring.groups import Group, group_of, is_dtensor, rank_in, ranks_of, ring_of
from .gather import AllGather
from .layout import from_layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    Row = Sequence[int]


def tree_extents(parents: Row | Sequence[Row], lengths: Row | Sequence[Row]) -> TreeExtents:
    """Return ``key_extents`` int32 [batch, tokens, 2] and ``positions`` int32 [batch, tokens] of prefix trees, on the CPU.

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
    return TreeExtents(*map(torch.from_numpy, trees.tree_extents(parents, lengths)))


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
    split between two rollouts, and another row repeats their shared prefix. In the result, ids and labels are int64 on the CPU.
    ``saved_tokens`` is the number of tokens that need not be computed, because rollouts share them.

    Raise ValueError if a rollout is empty, is not a list of token ids, or is longer than ``length``, or if masks or weights do
    not fit the rollouts.
    """
    packed = packing.pack_rollouts(rollouts, loss_masks, weights, length)
    wide = {name: torch.from_numpy(getattr(packed, name)).long() for name in ("ids", "labels", "predictors")}
    narrow = {name: torch.from_numpy(getattr(packed, name)) for name in ("label_weights", "positions")}
    return replace(packed, **wide, **narrow)


def unpack_rollouts(
    values: Tensor,
    rollouts: Rollouts,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    layout: str | BalancedLayout | None = None,
) -> list[Tensor]:
    """Return for each rollout the values [tokens - 1, ...] at the slots that predict its tokens, on every rank.

    No slot predicts the first token of a rollout. ``values``: one value per slot, [rows, tokens, ...], such as
    :func:`token_log_probs` of ``rollouts.labels``. Without ``layout``, pass whole rows. With ``layout`` (a name or the
    ``.layout`` of a shard), pass this rank's shard of the rows. ``group``: the ring that holds the shards; None is the default
    group. Loss masks are not applied: masked tokens have values too.

    Differentiable: the gradient of a value is the sum over the rollouts that share the value, in at least float32. With
    ``layout`` each rank keeps the gradient of its own shard, without a sum over ranks. So if every rank computes the same loss
    from all rollouts, the gradients of the weights, summed over ranks (:func:`sum_gradients`), equal those of one device; do not
    divide them by the number of ranks.

    Raise ValueError, before anything is sent, if the shape of ``values`` does not fit ``rollouts``. With ``layout`` ranks compare
    shapes and rollouts at every call, in one exchange. If ranks differ, raise ValueError, the same on every rank. Without
    ``layout`` ranks compare nothing. A rank that then raises an error still reports it to the ranks of ``group``: they may have
    passed ``layout``, and wait for this rank's shard.
    """
    ring = None if layout is None else ring_of(group)
    ranks = ranks_of(ring)

    def check() -> None:
        if not isinstance(values, Tensor) or is_dtensor(values):
            raise ValueError(f"values must be a torch.Tensor, whole or this rank's shard, got {in_words(values)}")
        packing.check_values(tuple(values.shape), rollouts, layout, ranks)

    tensor = isinstance(values, Tensor)
    kind = (tuple(values.shape), str(values.dtype), values.device.type) if tensor else ((), "", "cpu")
    alike: Any = (("shape", kind[0]), ("dtype", kind[1]), ("layout", layout), ("rollouts", _digest(rollouts, ranks)))
    try:
        agree_on(AgreedCall("unpack_rollouts", kind[2], alike, each_time=True), ring, check)
    except ValueError as error:
        if layout is None and not torch.compiler.is_compiling():
            refuse(error, ring_of(group))  # this rank may have forgotten the layout, and the others wait for its shard
        raise
    wide = values.to(torch.promote_types(values.dtype, torch.float32)) if values.is_floating_point() else values
    if layout is not None:
        whole: Any = wide if ring is None or ranks == 1 else _GatherAlike.apply(wide, ring)
        wide = from_layout(whole, layout, ranks, rollouts.ids.shape[1])
    predicted = wide.flatten(0, 1)[rollouts.predictors.to(values.device)].to(values.dtype)
    return list(predicted.split(rollouts.counts))


def _digest(rollouts: Any, ranks: int) -> str | None:
    """Return a digest of ``rollouts`` for the ranks to compare; None on one rank, under torch.compile, or for another type."""
    if ranks == 1 or torch.compiler.is_compiling() or not isinstance(rollouts, Rollouts):
        return None
    arrays = b"".join(torch.as_tensor(x).cpu().numpy().tobytes() for x in (rollouts.ids, rollouts.labels, rollouts.predictors))
    return blake2b(arrays + repr((rollouts.counts, rollouts.tree)).encode(), digest_size=8).hexdigest()


class _GatherAlike(AllGather):
    """An all-gather for ranks that compute the same from its output. Its backward returns this rank's slice of the gradient."""

    @staticmethod
    def backward(ctx: Any, dwhole: Tensor) -> tuple[Tensor, None]:
        ring: Group = group_of(ctx.ring)
        return dwhole.chunk(ranks_of(ring), 1)[rank_in(ring)], None
