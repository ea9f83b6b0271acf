"""The documents of a call inside ``sequence_parallel``, from position_ids or cu_seq_lens_q, and the check that the two agree."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ring_attn_core.validation import in_words

from ..data.extents import document_extents, integers


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


def check_documents(name: str, call_arguments: dict[str, Any], shape: tuple[int, ...], cached: bool) -> None:
    """Raise ValueError if the arguments of a call of ``shape`` [batch, length] do not define its documents."""
    batch, length = shape
    if "seq_idx" in call_arguments and not {"position_ids", "cu_seq_lens_q"} & call_arguments.keys():
        raise ValueError(f"{name} got seq_idx alone, which no attention reads: pass position_ids that begin again for a document")
    if "cu_seq_lens_q" not in call_arguments:
        if "cu_seq_lens_k" in call_arguments:
            raise ValueError(f"{name} got cu_seq_lens_k without cu_seq_lens_q: pass both, or position_ids that begin again")
        return
    if batch != 1:
        raise ValueError(f"cu_seq_lens_q is for a batch of one row, got {batch}: pass position_ids that begin again")
    if cached:
        raise ValueError("cu_seq_lens_q came with a cache, which keeps one growing text a row: leave one of the two out")
    if not isinstance(call_arguments["cu_seq_lens_q"], Tensor):
        raise ValueError(f"cu_seq_lens_q must be a tensor, got {in_words(call_arguments['cu_seq_lens_q'])}")
    ends = integers("cu_seq_lens_q", call_arguments["cu_seq_lens_q"], "documents + 1")
    of_keys = call_arguments.get("cu_seq_lens_k", ends)
    if not isinstance(of_keys, Tensor) or of_keys.tolist() != ends.tolist():
        raise ValueError(
            f"cu_seq_lens_k must equal cu_seq_lens_q, since a token attends within its document: got {in_words(of_keys)} and "
            f"{in_words(ends)}"
        )
    if (end := max(ends.tolist(), default=0)) < length:
        raise ValueError(f"cu_seq_lens_q must end at the number of tokens, {length}, got {end}: count padding as a document")
    position_ids, present = text_positions(call_arguments.get("position_ids"), batch), call_arguments.get("attention_mask")
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
    if cu_seqlens is not None:
        extents = document_extents(cu_seqlens=cu_seqlens, length=length)
        return DocumentBounds(extents, present, extents[..., 0].long(), True)
    if position_ids is None and present is None:
        return DocumentBounds()
    source = position_ids if position_ids is not None else present
    assert source is not None
    starts = torch.zeros(source.shape, dtype=torch.bool, device=source.device)
    if position_ids is not None:
        starts[:, 1:] = _starts(position_ids, present)
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
