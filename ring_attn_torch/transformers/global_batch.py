"""The global sequences of a call: their documents, padding and blocks, and this rank's shard of arrays over their tokens.

Positions count tokens of the global sequence from 0, padding included. ``position_ids`` are different: a model computes rotary
angles from them, and they restart at every document of a packed row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ring_attn_core.runs import Band

from ..data.extents import document_extents
from ..data.layout import positions
from ..ring.groups import rank_in, ranks_of
from .pattern import Pattern


class ModelRing(NamedTuple):
    """The ring of a model: the arguments of ring_attention that are the same at every call."""

    group: dist.ProcessGroup | None = None
    layout: str = "zigzag"
    strategy: str = "auto"
    backend: str = "auto"

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return ranks_of(self.group)


class LayerMask(NamedTuple):
    """The mask of the layers of one pattern, which a model passes to the attention function as its attention_mask."""

    ring: ModelRing
    band: Band
    length: int
    extents: Tensor | None = None
    key_mask: Tensor | None = None
    offsets: Tensor | None = None
    """``int64`` [1 or batch, seq_local], the offset of each of this rank's tokens in its document."""
    dropout_seed: int | None = None


class DocumentBounds(NamedTuple):
    """The documents and padding of global sequences; all None if there is only one document without padding."""

    extents: Tensor | None = None
    """``int32`` [batch, length, 2], the interval of the tokens of its document without padding, [0, 0) for a padding token."""
    key_mask: Tensor | None = None
    """``bool`` [batch, length], for padding inside of documents, which intervals cannot express."""
    begins: Tensor | None = None
    """``int64`` [batch, length], the first position of a token's document, from which its chunks are counted."""
    packed: bool = False


@dataclass
class GlobalBatch:
    """The ``batch`` sequences of ``length`` tokens that ``ring`` shares.

    ``block_ends``: int64 [batch, length], the end (exclusive) of a token's block, whose tokens see one another whatever the mask,
    0 for a token in no block.
    """

    ring: ModelRing
    batch: int
    length: int
    device: torch.device
    documents: DocumentBounds
    block_ends: Tensor | None = None
    dropout_seed: int | None = None
    longest: Tensor | None = None
    """The largest of position_ids, 0-d, which a shard alone does not know."""
    known: dict[Pattern, LayerMask] = field(default_factory=dict)

    def __post_init__(self) -> None:
        own = positions(self.ring.layout, self.ring.ranks, self.length, rank_in(self.ring.group)).to(self.device).long()
        self.index, self.outside = own.clamp(max=self.length - 1), own >= self.length

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's part of ``x`` along ``dim`` in layout order, padded with copies of the last token."""
        return x.index_select(dim, self.index)

    def filled(self, x: Tensor, value: int) -> Tensor:
        """Return this rank's part of ``x`` [batch, length, ...], padded with ``value``."""
        outside = self.outside.view(1, -1, *[1] * (x.ndim - 2))
        return self.shard(x).masked_fill(outside, value)

    def seen(self, pattern: Pattern) -> LayerMask:
        """Return the mask of ``pattern`` within the documents and blocks."""
        if torch.compiler.is_compiling():
            return self._seen(pattern)  # a compiled graph of torch 2.11 cannot store a Band
        if pattern not in self.known:
            self.known[pattern] = self._seen(pattern)
        return self.known[pattern]

    def _seen(self, pattern: Pattern) -> LayerMask:
        extents, key_mask, begins, packed = self.documents
        band = pattern.band
        if pattern.chunk or self.block_ends is not None:
            position = torch.arange(self.length, device=self.device).expand(self.batch, -1)
            if extents is None:
                extents = torch.stack([torch.zeros_like(position), torch.full_like(position, self.length)], -1)
            (first, end), blind = extents.long().unbind(-1), extents[..., :1] == extents[..., 1:]
            if pattern.chunk:
                base = torch.zeros_like(position) if begins is None else begins
                first = torch.maximum(first, base + (position - base) // pattern.chunk * pattern.chunk)
            if self.block_ends is not None:
                end = torch.minimum(end, torch.maximum(position + 1, self.block_ends))
                band = Band(None, band.hi)
            extents = torch.stack([first, end], -1).masked_fill(blind, 0).int()
        offsets = self.index[None] - (self.shard(begins) if packed and begins is not None else 0)
        mine = None if extents is None else self.filled(extents, 0).contiguous()
        keys = None if key_mask is None else self.filled(key_mask, 0).contiguous()
        return LayerMask(self.ring, band, self.length, mine, keys, offsets, self.dropout_seed)


def documents_of(position_ids: Tensor | None, present: Tensor | None, cu_seqlens: Tensor | None, length: int) -> DocumentBounds:
    """Return the documents of a batch.

    ``position_ids`` int [batch, length]. Without ``present``, a document begins wherever a number is not one above the number
    before, as in transformers. With ``present``, it begins only where the numbers of two neighbours do not increase and neither
    is padding. ``present`` bool [batch, length]: False for padding. ``cu_seqlens`` int [documents + 1], instead of
    position_ids, for a batch of one row: 0, then the end of each document.
    """
    if cu_seqlens is not None:
        extents = document_extents(cu_seqlens=cu_seqlens, length=length)
        return DocumentBounds(extents, present, extents[..., 0].long(), True)
    if position_ids is None and present is None:
        return DocumentBounds()
    given = position_ids if position_ids is not None else present
    assert given is not None
    starts = torch.zeros(given.shape, dtype=torch.bool, device=given.device)
    if position_ids is not None:
        step = position_ids[:, 1:] - position_ids[:, :-1]
        starts[:, 1:] = step != 1 if present is None else (step <= 0) & present[:, 1:] & present[:, :-1]
    ids = starts.long().cumsum(1)
    packed = bool(starts.any())
    if present is None or bool(present.all()):
        if not packed:
            return DocumentBounds()
        extents = document_extents(ids)
        return DocumentBounds(extents, None, extents[..., 0].long(), True)
    last = torch.where(present, ids, -1).cummax(1).values  # the document of the last token that is not padding
    resumes = present[:, 1:] & ~present[:, :-1] & (last[:, :-1] == ids[:, 1:])
    if not bool(resumes.any()):
        extents = document_extents(torch.where(present, ids, -1))
        return DocumentBounds(extents, None, extents[..., 0].long(), packed)
    left = present.long().argmax(1, keepdim=True).expand(present.shape)
    if not packed:
        return DocumentBounds(None, present, left, False)
    extents = document_extents(ids)
    return DocumentBounds(extents, present, extents[..., 0].long(), True)


def ends_of_blocks(member: Tensor) -> Tensor:
    """Return int64 [batch, length]: the exclusive end of each run of True in ``member`` bool [batch, length], 0 outside."""
    length = member.shape[1]
    position = torch.arange(length, device=member.device)
    last = torch.cat([member[:, :-1] & ~member[:, 1:], member[:, -1:]], 1)
    ends = torch.where(last, position + 1, length).flip(1).cummin(1).values.flip(1)
    return torch.where(member, ends, 0)
