"""The packed documents and prefix trees in the rows of a call inside ``sequence_parallel``, and their balanced layout.

Documents come from position_ids or cu_seq_lens_q, which must agree. In a call with ``tree=(parents, lengths)`` each row holds
prefix trees, as ``pack_rollouts`` makes them: a token sees its ancestors in the tree, attention is causal, and the *key extent*
of a key is the interval of the queries that may see it. ``position_ids`` count tokens along the path from the root.

A layer's own window would count positions in the row, so it would count other branches too: after a prompt of 2 tokens and
completions of 100 and 1, a window of 102 would hide token 0 from the last token. If a window is at least as long as the longest
path, it hides no ancestor when counted along a path, so it is dropped. A shorter window is refused.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ring_attn_core.data import trees
from ring_attn_core.data.balanced_trees import balanced_tree_layout
from ring_attn_core.data.settings import BALANCED
from ring_attn_core.masks import causal, sliding_window
from ring_attn_core.plan.balanced import layout_of_stretches
from ring_attn_core.runs import Band
from ring_attn_core.validation import in_words

from ..data.extents import document_extents, integers
from .masks import CallArguments, CallRing, Pattern
from .mixers import mixers
from .models import own_positions

REFUSED_WITH_TREE = {
    "labels": "labels are shifted here, across segments: pass shift_labels=rollouts.labels, which pack_rollouts has shifted",
    "attention_mask": "the tree says which tokens see each other, and padding follows its last segment: leave it out",
    "position_ids": "the tree sets them, along the path from the root: leave them out",
    "token_type_ids": "the tokens of an image see later ones, and those of a tree see their ancestors: leave them out",
    "cu_seq_lens_q": "a row holds several documents as several trees, each with a parent of -1: leave it out",
}
"""Arguments that cannot be passed with a tree, each with the reason and the remedy."""


class DocumentBounds(NamedTuple):
    """The documents and padding of global sequences. Arrays not needed are None. ``packed``: a row may hold several documents."""

    extents: Tensor | None = None
    """``int32`` [batch, length, 2], the interval of each token's document. If key_mask is None, padding has [0, 0) and
    is in no interval."""
    key_mask: Tensor | None = None
    """``bool`` [batch, length], False for padding. None if padding is absent, or if ``extents`` exclude it."""
    begins: Tensor | None = None
    """``int64`` [batch, length], the first position of each token's document, from which chunks of attention are counted."""
    packed: bool = False


def check_positions(call: CallArguments) -> None:
    (batch, length), x = call.shape, call.by_name.get("position_ids")
    if "position_ids" not in inspect.signature(call.model.forward).parameters and not mixers(call.model):
        raise ValueError(
            f"{call.name}.forward takes no position_ids, so each rank would count its shard from 0: it does not run over a ring"
        )
    if x is None:
        if not own_positions(call.model):
            raise ValueError(
                f"{call.name} has no rotary embedding, and learned positions start and skip padding in ways of their own: pass "
                f"position_ids [batch, {length}], whole, as it would make them"
            )
        return
    good = isinstance(x, Tensor) and x.ndim in (2, 3) and x.shape[-1] == length and x.shape[-2] in (1, batch)
    if not good or (x.ndim == 3 and x.shape[0] not in (3, 4)):
        raise ValueError(
            f"position_ids must be [1 or {batch}, {length}], or [3 or 4, {batch}, {length}] for Qwen-VL, of the whole sequence, "
            f"got {shape_of(x)}: sequence_parallel shards them itself"
        )


def check_documents(call: CallArguments) -> None:
    (batch, length), given = call.shape, call.by_name
    if "seq_idx" in given and not {"position_ids", "cu_seq_lens_q"} & given.keys():
        raise ValueError(
            f"{call.name} got seq_idx alone, which no attention reads: pass position_ids that begin again for a document"
        )
    if "cu_seq_lens_q" not in given:
        if "cu_seq_lens_k" in given:
            raise ValueError(f"{call.name} got cu_seq_lens_k without cu_seq_lens_q: pass both, or position_ids that begin again")
        return
    if batch != 1:
        raise ValueError(f"cu_seq_lens_q is for a batch of one row, got {batch}: pass position_ids that begin again")
    if call.cache is not None:
        raise ValueError("cu_seq_lens_q came with a cache, which keeps one growing text a row: leave one of the two out")
    if not isinstance(given["cu_seq_lens_q"], Tensor):
        raise ValueError(f"cu_seq_lens_q must be a tensor, got {in_words(given['cu_seq_lens_q'])}")
    ends = integers("cu_seq_lens_q", given["cu_seq_lens_q"], "documents + 1")
    key_ends = given.get("cu_seq_lens_k", ends)
    if not isinstance(key_ends, Tensor) or key_ends.tolist() != ends.tolist():
        raise ValueError(
            f"cu_seq_lens_k must equal cu_seq_lens_q, since a token attends within its document: got {in_words(key_ends)} and "
            f"{in_words(ends)}"
        )
    if (end := max(ends.tolist(), default=0)) < length:
        raise ValueError(f"cu_seq_lens_q must end at the number of tokens, {length}, got {end}: count padding as a document")
    position_ids, present = text_positions(given.get("position_ids"), batch), given.get("attention_mask")
    if position_ids is None:
        return
    position_ids, present = position_ids.cpu(), None if present is None else present.cpu().bool()
    first = document_extents(cu_seqlens=ends.cpu(), length=length)[0, 1:, 0]
    by_ends, by_positions = first == torch.arange(1, length), _starts(position_ids, present)[0]
    if not bool(by_positions.any()):  # positions that never begin again name no document, and the ends part them
        return
    differ = (by_ends != by_positions) & (position_ids[0, 1:] != position_ids[0, :-1])  # padding often repeats position 0
    if present is not None:
        differ &= (present[:, 1:] & present[:, :-1])[0]
    if bool(differ.any()):
        token = int(differ.long().argmax())
        one, other = ("cu_seq_lens_q", "position_ids")[:: 1 if bool(by_ends[token]) else -1]
        raise ValueError(
            f"cu_seq_lens_q and position_ids disagree: by {one} a document begins at token {token + 1}, by {other} none "
            "does. Let position_ids begin again with each document, or leave one of the two out"
        )


def text_positions(position_ids: Tensor | None, batch: int) -> Tensor | None:
    """Return text positions [batch, length]: row 0 of [4, batch, length]. Qwen-VL's [3, batch, length] has none: return None."""
    if position_ids is not None and position_ids.ndim == 3:
        position_ids = position_ids[0] if position_ids.shape[0] == 4 else None
    return None if position_ids is None else position_ids.expand(batch, -1)


def _starts(position_ids: Tensor, present: Tensor | None) -> Tensor:
    """Return bool [batch, length - 1]: True for each token after the first that begins a document, as in ``documents_of``."""
    step = position_ids[:, 1:] - position_ids[:, :-1]
    return step != 1 if present is None else (step <= 0) & present[:, 1:] & present[:, :-1]


def documents_of(position_ids: Tensor | None, present: Tensor | None, cu_seqlens: Tensor | None, length: int) -> DocumentBounds:
    """Return the document bounds of a batch. ``position_ids`` int and ``present`` bool (False: padding) are [batch, length].

    A document begins where position_ids do not increase by exactly one, as in transformers; with ``present``, where they do
    not increase between two tokens that are not padding. ``cu_seqlens`` int [documents + 1], 0 and then the ends, takes their
    place.
    """
    within = lambda extents, key_mask, packed=True: DocumentBounds(extents, key_mask, extents[..., 0].long(), packed)
    if cu_seqlens is not None:
        return within(document_extents(cu_seqlens=cu_seqlens, length=length), present)
    source = position_ids if position_ids is not None else present
    if source is None:
        return DocumentBounds()
    starts = torch.zeros(source.shape, dtype=torch.bool, device=source.device)
    if position_ids is not None:
        starts[:, 1:] = _starts(position_ids, present)
    ids = starts.long().cumsum(1)
    packed = bool(starts.any())
    if present is None or bool(present.all()):
        return within(document_extents(ids), None) if packed else DocumentBounds()
    last = torch.where(present, ids, -1).cummax(1).values  # the document of the last token that is not padding
    resumes = present[:, 1:] & ~present[:, :-1] & (last[:, :-1] == ids[:, 1:])
    if not bool(resumes.any()):
        return within(document_extents(torch.where(present, ids, -1)), None, packed)
    if packed:
        return within(document_extents(ids), present)
    return DocumentBounds(None, present, present.long().argmax(1, keepdim=True).expand(present.shape), False)


class RowTrees(NamedTuple):
    key_extents: Tensor
    """int32 [batch, length, 2], the interval of the queries that may see each key; [0, 0) in padding."""
    positions: Tensor
    """int64 [batch, length], the position of each token on its path from the root."""
    longest: int

    def band(self, pattern: Pattern) -> Band:
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


def row_trees(call: CallArguments) -> RowTrees | None:
    if (tree := call.by_name.get("tree")) is None:
        return None
    key_extents, positions, _ = (torch.from_numpy(x).to(call.tokens.device) for x in trees.batch_of_trees(tree, *call.shape))
    return RowTrees(key_extents, positions.long(), trees.longest_path(trees.trees_of(*tree)))


def check_tree(call: CallArguments) -> None:
    _check_label_weights(call.by_name)
    if "tree" not in call.by_name:
        return
    for argument, remedy in REFUSED_WITH_TREE.items():
        if argument in call.by_name:
            raise ValueError(f"{call.name} got {argument} beside tree inside sequence_parallel: {remedy}")
    if call.cache is not None:
        raise ValueError("tree is for training, and use_cache=True for text: serve prompts that share a prefix by KVCache.fork")
    if linear := mixers(call.model):
        raise ValueError(
            f"{call.name} has linear layers ({next(iter(linear))} for one), whose state would branch with the tree: pass a row "
            "or a document for each path, and leave tree out"
        )
    if not own_positions(call.model):
        raise ValueError(
            f"{call.name} has no rotary embedding, and tree sets position_ids for rotary embeddings alone: leave tree out"
        )
    trees.batch_of_trees(call.by_name["tree"], *call.shape)


def _check_label_weights(call_arguments: dict[str, Any]) -> None:
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


def deal_batch(
    ring: CallRing, model: PreTrainedModel, extents: Tensor | None, length: int, tree: tuple[Any, Any] | None = None
) -> CallRing:
    """Replace the layout "balanced" of ``ring`` by a batch's BalancedLayout. ``extents`` int [batch, length, 2]: each token's
    document, empty for padding; None: each row is one. ``tree``: (parents, lengths) of prefix trees instead, or None."""
    if ring.layout != BALANCED:
        return ring
    if tree is not None:
        return ring._replace(layout=balanced_tree_layout(*tree, ring.ranks, length=length))
    rows = [[(0, length)]]
    if extents is not None:
        first, end = extents.cpu().unbind(-1)
        ids = torch.where(first < end, first, -1)
        stretches = [torch.unique_consecutive(row, return_counts=True) for row in ids]
        rows = [list(zip(owners.tolist(), tokens.tolist(), strict=True)) for owners, tokens in stretches]
    return ring._replace(layout=layout_of_stretches(rows, length, ring.ranks, layer_masks(model.config.get_text_config())))


def layer_masks(config: PreTrainedConfig) -> dict[Band, float]:
    """Count the layers of each mask, causal with or without a window, as its weight in the work; 1.0 for a single mask."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if not window or window < 1:
        return {causal(): 1.0}
    kinds = kinds or ["sliding_attention"]
    counts = {
        causal(): len(kinds) - kinds.count("sliding_attention"),
        sliding_window(window - 1): kinds.count("sliding_attention"),
    }
    return {mask: float(count) for mask, count in counts.items() if count}


def shape_of(x: Any) -> list[int] | str:
    return list(x.shape) if isinstance(x, Tensor) else type(x).__name__
