"""The shards of a call: the conversion of global input_ids, labels, positions and images to this rank's tokens.

Padding repeats the last token; the labels of padding are ignore_index. A ``GlobalBatch`` holds the shards, and the documents,
padding and image blocks of the global sequences, from which ``ring_mask`` makes masks.

Positions count the tokens of the global sequence from 0, padding included. The argument ``position_ids`` is different: it
restarts at each document of a packed row, and a model computes rotary angles from it.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss, ForTokenClassification

from ring_attn_core.masks import causal
from ring_attn_core.runs import Band

from ..data.layout import positions
from ..recurrence.runs import Where
from ..ring.groups import rank_in
from .documents import DocumentBounds, RowTrees, deal_batch, documents_of, row_trees, shape_of, text_positions
from .masks import CallArguments, CallRing, LayerMask, Pattern, RunningCall
from .mixers import check_padding, mixers

IMAGE_BLOCKS = {"gemma3", "gemma3_text"}
"""Models, by config.model_type, whose token_type_ids of 1 mark an image's tokens, which also see the image's later tokens."""

SHIFTED, IN_PLACE = (ForCausalLMLoss,), (ForMaskedLMLoss, ForTokenClassification)
"""transformers' losses that are sums over tokens. SHIFTED: a token predicts the next token's label; IN_PLACE: its own label."""

LABELS = ("labels", "shift_labels", "label_weights")
SHARDED = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids", *LABELS, "tree")
LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Arguments added by collators of packed documents.

seq_idx is not read: position_ids and cu_seq_lens_q say which documents a convolution reads.
"""

VISUAL = ("visual_pos_masks", "deepstack_visual_embeds")
"""Arguments of Qwen3-VL and similar models: the mask of visual tokens, and the features that each of the first layers adds."""

UNSPLIT = ("deepstack_features", "per_layer_inputs")
"""Arguments with values per token that sequence_parallel does not split. A model with one of them cannot take inputs_embeds."""


def global_batch(call: CallArguments) -> GlobalBatch:
    given, tokens, (batch, length) = call.by_name, call.tokens, call.shape
    move = lambda name: given[name].to(tokens.device) if name in given else None
    position_ids, present, types = move("position_ids"), move("attention_mask"), move("token_type_ids")
    present = None if present is None else present.bool()
    documents = documents_of(text_positions(position_ids, batch), present, move("cu_seq_lens_q"), length)
    ring = deal_batch(call.ring, call.model, documents.extents, length, given.get("tree"))
    tree = row_trees(call)
    position_ids = position_ids if tree is None else tree.positions
    blocks = None
    if types is not None and call.model.config.model_type in IMAGE_BLOCKS:
        blocks, types = ends_of_blocks(types == 1), None
    if position_ids is None:
        position_ids = torch.arange(length, device=tokens.device)[None].expand(batch, -1)
    whole = GlobalBatch(ring, batch, length, documents, blocks, call.seed, tree, device=tokens.device, longest=position_ids.max())
    left_out = {*SHARDED, *LENGTHS, *VISUAL, "num_items_in_batch", "ignore_index", "use_cache"}
    ones = torch.ones(batch, length, dtype=torch.bool, device=tokens.device)
    whole.present = whole.filled(ones if present is None else present, 0)
    hybrid, taken = mixers(call.model), inspect.signature(call.model.forward).parameters
    if hybrid:
        check_padding(call, len(whole.index))
    whole.kwargs = {name: x for name, x in given.items() if name not in left_out} | {
        "input_ids" if "input_ids" in given else "inputs_embeds": whole.shard(tokens),
        "attention_mask": whole.present if hybrid else torch.ones_like(whole.present),
    }
    if "position_ids" in taken:
        whole.kwargs["position_ids"] = whole.shard(position_ids, -1)
    if "use_cache" in taken or hybrid:
        whole.kwargs["use_cache"] = False
    if types is not None:
        whole.kwargs["token_type_ids"] = whole.shard(types)
    if VISUAL[0] in given:
        features, reader = _features(whole, given), reader_of(call.model, VISUAL)
        if reader is call.model:
            whole.kwargs |= features
        elif reader is not None:
            whole.features = reader, features
    if {"labels", "shift_labels"} & given.keys():
        whole.ignore_index, whole.divisor = given.get("ignore_index", -100), given.get("num_items_in_batch")
        whole.shifted = call.model.loss_function in SHIFTED and "shift_labels" not in given
        labels: Any = move("shift_labels" if "shift_labels" in given else "labels")
        if whole.shifted:
            labels = F.pad(labels[:, 1:], (0, 1), value=whole.ignore_index)
        if present is not None:  # what padding predicts depends on the attention: of a query without keys out is 0 here
            labels = labels.masked_fill(~present, whole.ignore_index)
        whole.labels = whole.filled(labels, whole.ignore_index)
        weights = move("label_weights")
        whole.label_weights = None if weights is None else whole.filled(weights, 0)
        if given.get("fused_lm_head"):
            whole.fused, whole.kwargs["shift_labels"] = True, whole.labels
    return whole


def _features(whole: GlobalBatch, given: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's visual_pos_masks [batch, local] and deepstack_visual_embeds, the features of its image tokens."""
    mask = given[VISUAL[0]].to(whole.device).bool()
    number = (mask.flatten().long().cumsum(0) - 1).view(mask.shape)
    mine = whole.filled(mask, 0)
    rows = whole.shard(number)[mine]
    return {VISUAL[0]: mine, VISUAL[1]: [x.to(whole.device)[rows] for x in given[VISUAL[1]]] or None}


@dataclass(eq=False)
class GlobalBatch(RunningCall):
    """A running call without a cache. ``block_ends``: int64 [batch, length], the exclusive end of a token's image block, or 0."""

    ring: CallRing
    batch: int
    length: int
    documents: DocumentBounds
    block_ends: Tensor | None = None
    dropout_seed: int | None = None
    tree: RowTrees | None = None
    labels: Tensor | None = None
    """int64 [batch, local], the label of each token, or ``ignore_index``; None: the call computes no loss."""
    label_weights: Tensor | None = None
    """The factor of each label's loss [batch, local]; None: 1."""
    shifted: bool = False
    """True if labels were shifted here; False if the caller has shifted them, or if a token predicts its own label."""
    fused: bool = False
    """True if trl's head (``add_fused_lm_head``) returns log-probabilities in place of logits."""
    ignore_index: int = -100
    divisor: Any = None
    """num_items_in_batch, the divisor of the loss; None: the number of labels of all ranks, or the sum of their weights."""
    features: tuple[PreTrainedModel, dict[str, Any]] | None = None
    """The submodel that reads image features, and its arguments for this rank; None if the model itself or nothing reads them."""
    present: Tensor | None = None
    """``bool`` [batch, local], False for padding, which the auxiliary loss of routers leaves out."""
    summed_vocab: int | None = None
    """The vocabulary of a head that returns the sum of the losses (``ChunkedHead``); None: the head returns logits."""
    known: dict[Pattern, LayerMask] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = positions(self.ring.layout, self.ring.ranks, self.length, rank_in(self.ring.group)).to(self.device).long()
        self.index, self.outside = own.clamp(max=self.length - 1), own >= self.length

    def begin(self, model: PreTrainedModel) -> None:
        """Add a hook that passes image features to the submodel that reads them, because the outer models do not pass them on."""
        if self.features is not None:
            reader, features = self.features
            hook = reader.register_forward_pre_hook(lambda _, args, kwargs: (args, kwargs | features), with_kwargs=True)
            self.scope.callback(hook.remove)

    @property
    def runs_mixers(self) -> bool:
        """Return True if rows are sharded or hold documents."""
        return self.ring.ranks > 1 or self.documents.packed

    def tokens_of(self, convolution: bool) -> Where:
        mask = self.mask_of(Pattern(causal()))
        return Where(mask.ring.group, mask.ring.layout, mask.length, mask.extents if self.documents.packed else None)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's shard of ``x`` along ``dim`` in layout order, padded with copies of the last token."""
        return x.index_select(dim, self.index)

    def filled(self, x: Tensor, value: int) -> Tensor:
        outside = self.outside.view(1, -1, *[1] * (x.ndim - 2))
        return self.shard(x).masked_fill(outside, value)

    def mask_of(self, pattern: Pattern) -> LayerMask:
        if torch.compiler.is_compiling():
            return self._mask(pattern)  # a compiled graph of torch 2.11 cannot store a Band
        if pattern not in self.known:
            self.known[pattern] = self._mask(pattern)
        return self.known[pattern]

    def _mask(self, pattern: Pattern) -> LayerMask:
        if self.tree is not None:
            keys, offsets = self.filled(self.tree.key_extents, 0).contiguous(), self.shard(self.tree.positions)
            band, seed = self.tree.band(pattern), self.dropout_seed
            return LayerMask(self.ring, band, self.length, offsets=offsets, dropout_seed=seed, key_extents=keys)
        extents, key_mask, begins, packed = self.documents
        band = pattern.band
        if pattern.chunk or self.block_ends is not None:
            position = torch.arange(self.length, device=self.device).expand(self.batch, -1)
            if extents is None:
                extents = torch.stack([torch.zeros_like(position), torch.full_like(position, self.length)], -1)
            (first, end), padding = extents.long().unbind(-1), extents[..., :1] == extents[..., 1:]
            if pattern.chunk:
                base = torch.zeros_like(position) if begins is None else begins
                first = torch.maximum(first, base + (position - base) // pattern.chunk * pattern.chunk)
            if self.block_ends is not None:
                end = torch.minimum(end, torch.maximum(position + 1, self.block_ends))
                band = Band(None, band.hi)
            extents = torch.stack([first, end], -1).masked_fill(padding, 0).int()
        offsets = self.index[None] - (self.shard(begins) if packed and begins is not None else 0)
        mine = None if extents is None else self.filled(extents, 0).contiguous()
        keys = None if key_mask is None else self.filled(key_mask, 0).contiguous()
        return LayerMask(self.ring, band, self.length, mine, keys, offsets, self.dropout_seed)


def ends_of_blocks(member: Tensor) -> Tensor:
    """Return for each token the exclusive end of its run of True in ``member``, or 0 if it is in none: int64 [batch, length]."""
    length = member.shape[1]
    position = torch.arange(length, device=member.device)
    last = torch.cat([member[:, :-1] & ~member[:, 1:], member[:, -1:]], 1)
    ends = torch.where(last, position + 1, length).flip(1).cummin(1).values.flip(1)
    return torch.where(member, ends, 0)


def reader_of(model: PreTrainedModel, names: tuple[str, ...]) -> PreTrainedModel | None:
    """Return the last (innermost) PreTrainedModel of ``model.modules()`` whose forward has an argument in ``names``, or None."""
    reads = lambda module: not {*names}.isdisjoint(inspect.signature(module.forward).parameters)
    found = [module for module in model.modules() if isinstance(module, PreTrainedModel) and reads(module)]
    return found[-1] if found else None


def check_visual(call: CallArguments) -> None:
    name, given, passed = call.name, call.by_name, [argument for argument in VISUAL if argument in call.by_name]
    if "inputs_embeds" not in given and not passed:
        return
    if (other := reader_of(call.model, UNSPLIT)) is not None:
        raise ValueError(
            f"{name} adds more to its layers than inputs_embeds hold ({' or '.join(UNSPLIT)} of {type(other).__name__}), which "
            "sequence_parallel does not split: pass input_ids, and run batches with images unsharded"
        )
    if reader_of(call.model, VISUAL) is None:
        if passed:
            raise ValueError(f"{name} takes no {passed[0]}: leave it out")
        return
    mask, features = (given.get(argument) for argument in VISUAL)
    if "inputs_embeds" not in given or mask is None or features is None:
        raise ValueError(
            f"{name} adds features of images to the hidden states of its first layers, which inputs_embeds alone do not hold: "
            "pass inputs_embeds, visual_pos_masks [batch, length], True for tokens of images, and deepstack_visual_embeds, a "
            "list of [tokens of images, dim], together; for text alone an empty list and a mask of False"
        )
    if call.cache is not None:
        raise ValueError(f"{name} got {VISUAL[0]} in a call with a cache, which knows text alone: leave use_cache out")
    if not isinstance(mask, Tensor) or tuple(mask.shape) != call.shape:
        raise ValueError(f"{VISUAL[0]} must be {list(call.shape)}, [batch, length] of the whole sequence, got {shape_of(mask)}")
    count, dim = int(mask.sum()), given["inputs_embeds"].shape[-1]
    for i, x in enumerate(features):
        if not isinstance(x, Tensor) or tuple(x.shape) != (count, dim):
            raise ValueError(f"{VISUAL[1]}[{i}] must be {[count, dim]}, a row for each True of {VISUAL[0]}, got {shape_of(x)}")
