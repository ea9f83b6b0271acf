"""The check that each token of a RingTransformer is at a position that its extents allow.

An extent is the interval of keys that a query may see; under a causal mask it must begin at or before the query. A key extent is
the interval of queries that may see a key; in a tree it must contain the key's own position. The check finds most calls that
omit the ``layout`` of their shard.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ring_attn_core.data.layout_check import check_extents_match_layout, mark_mismatches
from ring_attn_core.layouts import find_layout
from ring_attn_core.plan.balanced_layout import BalancedLayout
from ring_attn_core.validation import is_integer, is_traced

from ..attend.keys import clip
from ..axes import sharded_like
from ..call.traced import TracedLayout, every_position
from ..data.extents import on_host
from .parts import reshard
from .ring import LayerRing


def check_layout(
    x: jax.Array,
    extents: Any,
    key_extents: Any,
    length: Any,
    layout: BalancedLayout | TracedLayout | None,
    ring: LayerRing,
) -> jax.Array:
    """Return ``x`` [b s dim] with NaN at misplaced tokens, or raise ValueError if the values of the extents are known.

    A causal query is misplaced if its extent begins after it, a token of a tree if it lies outside its key extent. Arrays of
    wrong shapes and dtypes are not checked, because the layers refuse them.
    """
    arrays = [(tree, given) for tree, given in ((False, extents), (True, key_extents)) if _fits(given, x)]
    tokens = _tokens(x.shape[1], layout, ring) if arrays else None
    if tokens is None:
        return x
    wrong: Any = None
    for tree, given in arrays:
        values = on_host(given) if isinstance(tokens, np.ndarray) else None
        if values is not None:
            inside = slice(None) if tree or not _is_known(length) else tokens < length
            check_extents_match_layout(values[:, inside], tokens[inside], tree)
            continue
        rows = tokens[None]  # of the rank of the extents: jax_numpy_rank_promotion may be "raise"
        found = mark_mismatches(clip(jnp.asarray(given)), rows, tree)
        found = found if tree or not _is_known(length) else found & (rows < length)
        wrong = found if wrong is None else wrong | found
    if wrong is None:
        return x
    return jnp.where(reshard(wrong, PartitionSpec(*sharded_like(x)[:2]), x)[..., None], jnp.nan, x)


def _is_known(length: Any) -> bool:
    return is_integer(length) and not is_traced(length)


def _fits(extents: Any, x: jax.Array) -> bool:
    shape, dtype = getattr(extents, "shape", None), getattr(extents, "dtype", None)
    return shape == (*x.shape[:2], 2) and dtype is not None and jnp.issubdtype(dtype, jnp.integer)


def _tokens(count: int, layout: BalancedLayout | TracedLayout | None, ring: LayerRing) -> Any:
    """Return the global positions [count], as a NumPy array if known at trace time; None if the layout has another count."""
    where = ring.sharded
    if where is None:
        tokens: Any = ring.positions(count, layout)
    elif isinstance(layout, TracedLayout):
        tokens = on_host(layout.table)
        tokens = (layout.table if tokens is None else tokens).reshape(-1)
    elif isinstance(layout, BalancedLayout):
        tokens = every_position(layout).reshape(-1)
    else:
        local = count // where.ranks
        runs = (run for rank in range(where.ranks) for run in find_layout(layout or ring.layout)(rank, where.ranks, local))
        held = [run.start + run.stride * np.arange(run.length, dtype=np.int32) for run in runs]
        tokens = np.concatenate([np.empty(0, np.int32), *held])
    return tokens if tokens.shape == (count,) else None
