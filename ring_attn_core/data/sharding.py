"""Checks of the arguments of ``shard_batch``, and the layout of its shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..layouts import check_rank
from ..plan.balanced import layout_of_ids
from ..plan.balanced_layout import BalancedLayout
from ..validation import check_integer
from .balanced_trees import balanced_tree_layout


def check_arguments(
    rank: Any, ranks: int, ignore_index: Any, has_documents: bool, has_tree: bool, restart_positions: bool
) -> None:
    """Check the arguments of ``shard_batch`` that are not arrays, and that documents and a tree are not both passed."""
    if rank is not None:
        check_rank(rank, ranks)
    check_integer("ignore_index", ignore_index)
    if restart_positions and not has_documents:
        raise ValueError(
            "restart_positions=True counts positions from the start of each document: pass documents=..., or leave it out, as "
            "with a tree, whose positions count from its root"
        )
    if has_documents and has_tree:
        raise ValueError("documents and tree were given: pass the tree alone, with a root (parent -1) for each document")


def make_layout(
    layout: str | BalancedLayout, ranks: int, length: int, tree: tuple[Any, Any] | None, read_owner: Callable[[], Any]
) -> str | BalancedLayout:
    """Return ``layout``, or the layout that "balanced" means for a batch of ``length`` tokens.
    ``read_owner``: returns the document id of each token as a NumPy array [batch, length], or None if the values are unknown."""
    if layout != "balanced":
        return layout
    if tree is not None:
        return balanced_tree_layout(*tree, ranks, length=length)
    ids = read_owner()
    if ids is None:
        raise ValueError(
            'layout="balanced" follows from the values of documents, which a compiled function does not know: call shard_batch '
            "before it"
        )
    return layout_of_ids(ids, ranks)


def check_shape(name: str, shape: tuple[int, ...], ids: tuple[int, ...]) -> None:
    if shape != ids:
        raise ValueError(f"{name} must have the shape of ids {list(ids)}, got {list(shape)}")


def check_key_mask(is_bool: bool, dtype: Any) -> None:
    if not is_bool:
        raise ValueError(
            f"key_mask must be bool, True where a key may be attended, got {dtype}: pass key_mask != 0 for zeros and "
            "ones, key_mask == 0 for an additive mask (0 and -inf)"
        )
