"""Settings that differ between layers: the mask and the dropout offset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..masks import check_mask
from ..runs import Band


def layer_masks(mask: Band, windows: Sequence[int | None] | None, depth: int) -> list[Band]:
    """Return the mask of each layer: ``mask``, limited to w earlier and w later tokens if the layer's window is an int w."""
    check_mask(mask)
    if windows is None:
        return [mask] * depth
    if not isinstance(windows, Sequence) or len(windows) != depth:
        raise ValueError(
            f"windows must be a list of one value for each of {depth} layers, how many tokens before and after itself a token "
            f"sees, or None for all that the mask lets it, got {windows!r}"
        )
    for layer, window in enumerate(windows):
        if window is not None and (isinstance(window, bool) or not hasattr(window, "__index__") or window < 0):
            raise ValueError(
                f"windows[{layer}] must be an int of at least 0, 0 for a token that sees only itself, or None for all that the "
                f"mask lets it, got {window!r}"
            )
    return [mask if window is None else mask.within(window.__index__()) for window in windows]


def layer_offset(offset: Any, layer: int, heads: int) -> Any:
    """Return a layer's ``dropout_offset`` (first batch row, first head); heads are numbered after those of earlier layers.
    An ``offset`` that is not a pair stays unchanged; ring_attention then raises the error."""
    if not isinstance(offset, tuple | list) or len(offset) != 2:
        return offset
    return offset[0], layer * heads + offset[1]
