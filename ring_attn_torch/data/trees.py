"""Prefix trees: their key extents, and the packing and unpacking of rollouts."""

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
from ..ring.groups import Group, group_of, is_dtensor, rank_in, ranks_of
from .gather import AllGather, _ring
from .layout import from_layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    Row = Sequence[int]


def tree_extents(parents: Row | Sequence[Row], lengths: Row | Sequence[Row]) -> TreeExtents:
    """Return ``key_extents`` int32 [batch, tokens, 2] and ``positions`` int32 [batch, tokens] of prefix trees, on the CPU.

    ``parents``, ``lengths``: lists of ints for one row, or a list of such lists. They hold, for each segment in depth-first
    order, the index of its parent segment in the row and its number of tokens. A parent of -1 begins a tree; a row may hold
    several trees.

    Key j is seen by the queries [j, end), where end is the end of the subtree of j's segment. So under ``mask=causal()`` a token
    sees only itself and its ancestors. Positions count along the path from the root, for rotary embeddings. Shorter rows are
    padded with (0, 0) and 0. Both arrays describe whole rows; :func:`to_layout` shards them.

    Raise ValueError if the arguments are not such lists, a parent comes after its child, segments are not in depth-first order,
    or a segment is empty.
    """
    return TreeExtents(*map(torch.from_numpy, trees.tree_extents(parents, lengths)))


def pack_rollouts(
    rollouts: Sequence[Any],
    *,
    loss_masks: Sequence[Any] | None = None,
    weights: Sequence[Any] | None = None,
    length: int | None = None,
) -> Rollouts:
    """Pack rollouts (token lists) that share prefixes into rows of prefix trees.

    A shared token is computed once, except where rollouts branch.

    Each token of a row is a slot with one label. A token that several tokens follow takes a slot for each of them.

    ``rollouts``: lists or integer arrays [tokens], prompt and completion together. ``loss_masks``: for each rollout a list with
    True for each token that counts; None: each counts. ``weights``: for each rollout a number, or a list with the weight of each
    token, of any sign; None: 1. No token predicts the first token of a rollout, so its mask and its weight have no effect.

    Summed over all slots, ``label_weights`` times the cross-entropy of ``labels`` is the weighted loss of all rollouts computed
    one by one. A label is -100 if no rollout counts it; a counted label of weight 0 stays. Labels are shifted already: do not
    shift them again.

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

    No slot predicts the first token of a rollout. ``values`` [rows, tokens, ...], such as :func:`token_log_probs` of
    ``rollouts.labels``: whole rows, or with ``layout`` (a name or the ``.layout`` of a shard) this rank's shard of them.
    ``group``: the ring that holds the shards; None is the default group. Loss masks are not applied: masked tokens have values
    too.

    Differentiable: the gradient of a value is the sum over the rollouts that share it, in at least float32. With ``layout`` each
    rank keeps its own slice of the gradient, without a sum over ranks. So if every rank computes the same loss from all rollouts,
    the sum over ranks of the gradients of weights (:func:`sum_gradients`) is that of one device; do not divide by the number of
    ranks.

    Raise ValueError, before anything is sent, if ``values`` do not have the shape of the rollouts. With ``layout`` ranks compare
    shapes and rollouts at every call, in one exchange. If these differ, raise ValueError; every rank raises the same error.
    Without ``layout`` ranks compare nothing. A rank still reports its error to the ranks of ``group``, which may wait for its
    shard.
    """
    ring = None if layout is None else _ring(group)
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
            refuse(error, _ring(group))  # this rank may have forgotten the layout, and the others wait for its shard
        raise
    wide = values.to(torch.promote_types(values.dtype, torch.float32)) if values.is_floating_point() else values
    if layout is not None:
        whole: Any = wide if ring is None or ranks == 1 else _GatherAlike.apply(wide, ring)
        wide = from_layout(whole, layout, ranks, rollouts.ids.shape[1])
    predicted = wide.flatten(0, 1)[rollouts.predictors.to(values.device)].to(values.dtype)
    return list(predicted.split(rollouts.counts))


def _digest(rollouts: Any, ranks: int) -> str | None:
    """Return a digest of ``rollouts`` that the ranks compare, or None.

    None: on one rank, under torch.compile, or if ``rollouts`` is not a Rollouts.
    """
    if ranks == 1 or torch.compiler.is_compiling() or not isinstance(rollouts, Rollouts):
        return None
    arrays = b"".join(torch.as_tensor(x).cpu().numpy().tobytes() for x in (rollouts.ids, rollouts.labels, rollouts.predictors))
    return blake2b(arrays + repr((rollouts.counts, rollouts.tree)).encode(), digest_size=8).hexdigest()


class _GatherAlike(AllGather):
    """An all-gather whose output each rank uses for the same computation. The backward returns a slice, this rank's gradient."""

    @staticmethod
    def backward(ctx: Any, dwhole: Tensor) -> tuple[Tensor, None]:
        ring: Group = group_of(ctx.ring)
        return dwhole.chunk(ranks_of(ring), 1)[rank_in(ring)], None
