"""The balanced layout inside ``sequence_parallel``: each call assigns its documents or trees to ranks, to balance their work."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ring_attn_core.data.balanced_trees import balanced_tree_layout
from ring_attn_core.data.settings import BALANCED
from ring_attn_core.layouts import named
from ring_attn_core.masks import causal, sliding_window
from ring_attn_core.plan.balanced import layout_of_stretches
from ring_attn_core.runs import Band

from .arguments import CheckedArguments
from .masks import CallRing
from .models import text_config


def check_layout_name(layout: str) -> None:
    """Raise ValueError if ``layout`` is neither "balanced" nor the name of another layout."""
    if layout != BALANCED:
        named(layout)


def check_balanced(ring: CallRing, checked: CheckedArguments) -> None:
    """Raise ValueError if the ring's layout is "balanced" and a call has a cache."""
    if ring.layout == BALANCED and checked.cache is not None:
        raise ValueError(
            'layout="balanced" assigns the documents of a batch to the ranks, and a cache shares one growing text: to generate, '
            'enter with another layout, such as sequence_parallel(model, layout="zigzag")'
        )


def dealt(
    ring: CallRing, model: PreTrainedModel, extents: torch.Tensor | None, length: int, tree: tuple[Any, Any] | None = None
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
        rows = [list(zip(of.tolist(), tokens.tolist(), strict=True)) for of, tokens in stretches]
    return ring._replace(layout=layout_of_stretches(rows, length, ring.ranks, layer_masks(text_config(model.config))))


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
