"""The extents of documents and prefixes, which ``data/extents.py`` of ring_attn_core explains.

Extents describe global sequences. ``to_layout(extents, layout, ranks)`` shards them, and pads them with [0, 0).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ring_attn_core.data.extents import check_ids, check_one_form, check_prefix, length_of
from ring_attn_core.layouts import check_length
from ring_attn_core.validation import in_words

if TYPE_CHECKING:
    from jaxtyping import Int


def document_extents(
    ids: Int[Tensor, "batch length"] | None = None,
    *,
    cu_seqlens: Int[Tensor, " ends"] | None = None,
    length: int | None = None,
) -> Int[Tensor, "rows length 2"]:
    """Return the extents of packed documents: the first and end (exclusive) position of each token's document.

    The result is int32 [batch, length, 2], or [1, length, 2] for ``cu_seqlens``.

    ``ids`` int [batch, length]: the document of each token, not decreasing along a row. A negative id marks padding. Padding may
    lie before, between or after documents, but not inside one; its extent is [0, 0), and no query sees it.

    ``cu_seqlens`` int [documents + 1], instead of ``ids``: 0, then the end of each document. ``length``: the total number of
    positions, by default the end of the last document; required under torch.compile. Tokens beyond that end are padding.

    Raise ValueError if shapes, dtypes or values break these rules. Values are copied to the host for this check. Under
    torch.compile they are not checked, and the result for invalid values is undefined.
    """
    check_one_form(ids, cu_seqlens, length)
    if cu_seqlens is not None:
        return _extents_of_ends(integers("cu_seqlens", cu_seqlens, "documents + 1"), length)
    return _extents_of_ids(integers("ids", ids, "batch", "length"))


def prefix_extents(prefix: int | Int[Tensor, " batch"], length: int) -> Int[Tensor, "rows length 2"]:
    """Return the extents of a prefix-LM: token p sees [0, max(prefix, p + 1)). Use them with ``mask=full()``.

    The result is int32 [batch, length, 2], with batch 1 if ``prefix`` is an int. ``prefix``: the number of leading tokens that
    all queries see, an int or int [batch]. ``length``: the sequences' length without padding. Raise ValueError if an argument is
    not an integer, or if ``prefix`` is outside 0 .. length. Under torch.compile the value of ``prefix`` is not checked.
    """
    check_length(length)
    first = integers("prefix", prefix, *(["batch"] if convert("prefix", prefix).ndim else []))
    check_prefix(on_host(first), length)
    end = torch.maximum(first.reshape(-1, 1), torch.arange(1, length + 1, device=first.device)).int()
    return torch.stack([torch.zeros_like(end), end], -1)


def integers(name: str, x: Any, *dims: str) -> Tensor:
    array = convert(name, x)
    if array.dtype == torch.bool or array.is_floating_point() or array.is_complex() or array.ndim != len(dims):
        raise ValueError(f"{name} must be integers [{', '.join(dims)}], got {array.dtype} {list(array.shape)}")
    return array.long()


def convert(name: str, x: Any) -> Tensor:
    try:
        return torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be a tensor or nested lists of equal length, got {in_words(x)}") from error


def on_host(x: Tensor) -> np.ndarray | None:
    """Return ``x`` as a NumPy array, or None if its values cannot be read: under torch.compile, or of a meta tensor."""
    return None if torch.compiler.is_compiling() or x.is_meta else x.cpu().numpy()


def _extents_of_ids(ids: Tensor) -> Tensor:
    check_ids(on_host(ids), "torch.where")
    length = ids.shape[1]
    position = torch.arange(length, device=ids.device)
    change, edge = ids[:, 1:] != ids[:, :-1], torch.ones_like(ids[:, :1], dtype=torch.bool)
    starts, ends = torch.cat([edge, change], 1), torch.cat([change, edge], 1)
    first = torch.where(starts, position, 0).cummax(1).values
    end = torch.where(ends, position + 1, length).flip(1).cummin(1).values.flip(1)
    return torch.where((ids < 0)[..., None], 0, torch.stack([first, end], -1)).int()


def _extents_of_ends(ends: Tensor, length: int | None) -> Tensor:
    unknown = "under torch.compile: no shape can depend on the values of cu_seqlens"
    length = length_of(on_host(ends), ends.shape[0], length, unknown)
    position = torch.arange(length, device=ends.device)
    entry = torch.searchsorted(ends, position, right=True)
    extents = torch.stack([ends[entry - 1], ends[entry.clamp(max=ends.shape[0] - 1)]], -1)
    return torch.where((position < ends[-1])[:, None], extents, 0)[None].int()
