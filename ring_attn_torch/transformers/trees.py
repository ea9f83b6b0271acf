"""Prefix trees inside ``sequence_parallel``: the checks of a call's ``tree`` argument, and its arrays.

In a call with ``tree=(parents, lengths)`` each row holds prefix trees, as ``pack_rollouts`` makes them. ``tree`` gives the parent
and the length of each segment. A token sees its ancestors in the tree: attention is causal, and the *key extent* of a key is the
interval of the queries that may see it. ``position_ids`` count tokens along the path from the root.

A layer's own window would count positions in the row, so it would count other branches too: after a prompt of 2 tokens and
completions of 100 and 1, a window of 102 would hide token 0 from the last token. If a window is at least as long as the longest
path, it hides no ancestor when counted along a path, so it is dropped. A shorter window is refused.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ring_attn_core.data import trees
from ring_attn_core.masks import causal
from ring_attn_core.runs import Band

from .mask_functions import Pattern
from .models import own_positions

REFUSED = {
    "labels": "labels are shifted here, across segments: pass shift_labels=rollouts.labels, which pack_rollouts has shifted",
    "attention_mask": "the tree says which tokens see each other, and padding follows its last segment: leave it out",
    "position_ids": "the tree sets them, along the path from the root: leave them out",
    "token_type_ids": "the tokens of an image see later ones, and those of a tree see their ancestors: leave them out",
    "cu_seq_lens_q": "a row holds several documents as several trees, each with a parent of -1: leave it out",
}
"""Arguments that cannot be passed with a tree, each with the reason and the remedy."""


class RowTrees(NamedTuple):
    """The prefix trees in the rows of a call."""

    key_extents: Tensor
    """int32 [batch, length, 2], the interval of the queries that may see each key; [0, 0) in padding."""
    positions: Tensor
    """int64 [batch, length], the position of each token on its path from the root."""
    longest: int
    """The number of tokens on the longest path."""

    def band(self, pattern: Pattern) -> Band:
        """Return ``causal()``, the band of a layer on a tree. Raise ValueError if its ``pattern`` may hide ancestors or show
        later tokens."""
        if pattern.band.lo != 0:
            raise ValueError("tree goes with causal layers, and this model has layers that see later tokens: leave tree out")
        if pattern.chunk:
            raise ValueError(
                f"this model has layers of chunks of {pattern.chunk} tokens, which count positions of the row, not of the path "
                "from the root: leave tree out"
            )
        if pattern.band.hi is not None and pattern.band.hi + 1 < self.longest:
            raise ValueError(
                f"this model has layers with a window of {pattern.band.hi + 1} tokens, which counts positions of the row, and "
                f"the longest path of the tree has {self.longest}: a window that long hides no ancestor; pass shorter rollouts, "
                "or leave tree out"
            )
        return causal()


def row_trees(tree: Any, shape: tuple[int, int], device: torch.device) -> RowTrees:
    """Return the trees of ``tree``, a pair (parents, lengths). Raise ValueError if they do not fit ``shape`` [batch, length]."""
    key_extents, positions, _ = (torch.from_numpy(x).to(device) for x in trees.batch_of_trees(tree, *shape))
    return RowTrees(key_extents, positions.long(), trees.longest_path(trees.trees_of(*tree)))


def check_tree(model: PreTrainedModel, call_arguments: dict[str, Any], shape: tuple[int, ...], cached: bool) -> None:
    """Raise ValueError if ``tree`` or label_weights are invalid, or if ``tree`` contradicts the model or other arguments."""
    _check_label_weights(call_arguments)
    if "tree" not in call_arguments:
        return
    for argument, remedy in REFUSED.items():
        if argument in call_arguments:
            raise ValueError(f"{type(model).__name__} got {argument} beside tree inside sequence_parallel: {remedy}")
    if cached:
        raise ValueError("tree is for training, and use_cache=True for text: serve prompts that share a prefix by KVCache.fork")
    if not own_positions(model):
        raise ValueError(
            f"{type(model).__name__} has no rotary embedding, and tree sets position_ids for rotary embeddings alone: leave "
            "tree out"
        )
    trees.batch_of_trees(call_arguments["tree"], *shape)


def _check_label_weights(call_arguments: dict[str, Any]) -> None:
    """Raise ValueError if label_weights lack shift_labels or, without ``num_items_in_batch``, are negative or not finite."""
    weights, labels = call_arguments.get("label_weights"), call_arguments.get("shift_labels")
    if weights is None:
        return
    if labels is None:
        raise ValueError("label_weights came without shift_labels, which they weigh: pass both, as pack_rollouts returns them")
    counted = weights[labels.to(weights.device) != call_arguments.get("ignore_index", -100)]
    if "num_items_in_batch" not in call_arguments and not bool(((counted >= 0) & counted.isfinite()).all()):
        raise ValueError(
            "label_weights hold a weight that is negative or not finite, and the loss is divided by their sum: pass "
            "num_items_in_batch=1 for the weighted sum"
        )
