"""The shards of a call: the conversion of global input_ids, labels, positions and images to this rank's tokens.

``sharded`` checks the arguments (``arguments.py``) and shifts labels for the next token. Then it takes from each argument the
tokens at this rank's positions in the layout. Padding repeats the last token; the labels of padding are ignore_index. The result
is a ``GlobalBatch``: the shards, and the documents, padding and image blocks of the global sequences, from which ``ring_mask``
makes masks. A call with a cache is a ``CachedCall`` (``cache.py``) instead. Rotary embeddings that depend on the sequence length
get the largest position of all shards (``with_largest_position``).

Positions count the tokens of the global sequence from 0, padding included. The argument ``position_ids`` is different: it
restarts at each document of a packed row, and a model computes rotary angles from it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ring_attn_core.runs import Band

from ..data.layout import positions
from ..ring.groups import rank_in
from .arguments import LENGTHS, SHARDED, SHIFTED, CheckedArguments, checked_arguments
from .balanced import check_balanced, dealt
from .cache import CachedCall, cached_call
from .documents import DocumentBounds, documents_of, text_positions
from .mask_functions import Pattern
from .masks import CallRing, LayerMask, RunningCall, running
from .trees import RowTrees, row_trees
from .visual import VISUAL, reader_of

IMAGE_BLOCKS = {"gemma3", "gemma3_text"}
"""Models, by config.model_type, whose token_type_ids of 1 mark an image's tokens, which also see the image's later tokens."""


def sharded(model: PreTrainedModel, ring: CallRing, args: tuple[object, ...], kwargs: dict[str, Any]) -> GlobalBatch | CachedCall:
    """Return a call's record, a ``GlobalBatch`` or, with a cache, a ``CachedCall``. Its ``kwargs`` hold this rank's part of the
    arguments, or all tokens in some calls with a cache."""
    checked = checked_arguments(model, ring, args, kwargs)
    check_balanced(ring, checked)
    if checked.cache is not None:
        return cached_call(model, checked.cache, checked.by_name, checked.tokens)
    return _global_batch(model, ring, checked)


def _global_batch(model: PreTrainedModel, ring: CallRing, checked: CheckedArguments) -> GlobalBatch:
    """Return the GlobalBatch of checked arguments, with this rank's shards."""
    call_arguments, tokens, _, seed = checked
    batch, length = tokens.shape[:2]
    move = lambda name: call_arguments[name].to(tokens.device) if name in call_arguments else None
    position_ids, present, types = move("position_ids"), move("attention_mask"), move("token_type_ids")
    present = None if present is None else present.bool()
    text = text_positions(position_ids, batch)
    documents = documents_of(text, present, move("cu_seq_lens_q"), length)
    ring = dealt(ring, model, documents.extents, length, call_arguments.get("tree"))
    tree = row_trees(call_arguments["tree"], (batch, length), tokens.device) if "tree" in call_arguments else None
    position_ids = position_ids if tree is None else tree.positions
    blocks = None
    if types is not None and model.config.model_type in IMAGE_BLOCKS:
        blocks, types = ends_of_blocks(types == 1), None
    if position_ids is None:
        position_ids = torch.arange(length, device=tokens.device)[None].expand(batch, -1)
    whole = GlobalBatch(ring, batch, length, documents, blocks, seed, tree, device=tokens.device, longest=position_ids.max())
    kwargs: dict[str, Any] = {
        "input_ids" if "input_ids" in call_arguments else "inputs_embeds": whole.shard(tokens),
        "position_ids": whole.shard(position_ids, -1),
        "attention_mask": torch.ones(batch, len(whole.index), dtype=torch.bool, device=tokens.device),
    }
    if "use_cache" in inspect.signature(model.forward).parameters:
        kwargs["use_cache"] = False
    if types is not None:
        kwargs["token_type_ids"] = whole.shard(types)
    if VISUAL[0] in call_arguments:
        features, reader = _features(whole, call_arguments), reader_of(model, VISUAL)
        if reader is model:
            kwargs |= features
        elif reader is not None:
            whole.features = reader, features
    left_out = {*SHARDED, *LENGTHS, *VISUAL, "num_items_in_batch", "ignore_index", "use_cache"}
    whole.kwargs = {name: x for name, x in call_arguments.items() if name not in left_out} | kwargs
    ones = torch.ones(batch, length, dtype=torch.bool, device=tokens.device)
    whole.present = whole.filled(ones if present is None else present, 0)
    if {"labels", "shift_labels"} & call_arguments.keys():
        whole.ignore_index, whole.divisor = call_arguments.get("ignore_index", -100), call_arguments.get("num_items_in_batch")
        labels = call_arguments["shift_labels" if "shift_labels" in call_arguments else "labels"].to(tokens.device)
        whole.shifted = model.loss_function in SHIFTED and "shift_labels" not in call_arguments
        if whole.shifted:
            labels = F.pad(labels[:, 1:], (0, 1), value=whole.ignore_index)
        if present is not None:  # what padding predicts depends on the attention: of a query without keys out is 0 here
            labels = labels.masked_fill(~present, whole.ignore_index)
        whole.labels = whole.filled(labels, whole.ignore_index)
        weights = move("label_weights")
        whole.label_weights = None if weights is None else whole.filled(weights, 0)
        if call_arguments.get("fused_lm_head"):
            whole.fused, whole.kwargs["shift_labels"] = True, whole.labels
    return whole


def _features(global_batch: GlobalBatch, call_arguments: dict[str, Any]) -> dict[str, Any]:
    """Return this rank's visual_pos_masks [batch, local] and deepstack_visual_embeds, the features of its image tokens."""
    mask = call_arguments[VISUAL[0]].to(global_batch.device).bool()
    number = (mask.flatten().long().cumsum(0) - 1).view(mask.shape)
    mine = global_batch.filled(mask, 0)
    rows = global_batch.shard(number)[mine]
    return {VISUAL[0]: mine, VISUAL[1]: [x.to(global_batch.device)[rows] for x in call_arguments[VISUAL[1]]] or None}


@dataclass(eq=False)
class GlobalBatch(RunningCall):
    """A running call without a cache: its documents, padding and image blocks, and this rank's labels. ``block_ends``: int64
    [batch, length], the exclusive end of a token's block (an image of Gemma 3, whose tokens also see its later tokens), or 0."""

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
    """True if trl's head (``trl.py``) returns log-probabilities in place of logits."""
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

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's shard of ``x`` along ``dim`` in layout order, padded with copies of the last token."""
        return x.index_select(dim, self.index)

    def filled(self, x: Tensor, value: int) -> Tensor:
        """Return this rank's shard of ``x`` [batch, length, ...], padded with ``value``."""
        outside = self.outside.view(1, -1, *[1] * (x.ndim - 2))
        return self.shard(x).masked_fill(outside, value)

    def mask_of(self, pattern: Pattern) -> LayerMask:
        """Return the mask of layers with ``pattern`` (mask_functions.py), inside the documents and blocks of this rank."""
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


def rotary_by_length(model: PreTrainedModel) -> list[nn.Module]:
    """Return the rotary embeddings whose angles depend on the largest position of a call, which a shard may lack."""
    kind: Any = lambda module: getattr(module, "rope_type", "")
    kinds = lambda module: kind(module).values() if isinstance(kind(module), dict) else (kind(module),)
    return [module for module in model.modules() if {"dynamic", "longrope"} & {*kinds(module)}]


@contextmanager
def with_largest_position(rotary: nn.Module) -> Iterator[None]:
    """Pass the largest global position to a rotary embedding inside this ``with``, as one more token, removed afterwards."""

    def longest() -> Tensor | None:
        call = running()
        return None if call is None else call.longest

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        last = longest()
        if last is None:
            return None
        position_ids = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        more = torch.cat([position_ids, last.to(position_ids.dtype).expand(*position_ids.shape[:-1], 1)], -1)
        return ((args[0], more, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"position_ids": more})

    def after(_: nn.Module, args: tuple[Any, ...], angles: Any) -> Any:
        if longest() is None:
            return None
        return angles[..., :-1, :] if isinstance(angles, Tensor) else tuple(x[..., :-1, :] for x in angles)

    handles = rotary.register_forward_pre_hook(before, with_kwargs=True), rotary.register_forward_hook(after)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
