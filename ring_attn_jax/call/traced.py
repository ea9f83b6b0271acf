"""A balanced layout as an array argument, so that new documents of the same total length do not recompile a jitted function."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ring_attn_core.kernels.call import BEYOND
from ring_attn_core.masks import full
from ring_attn_core.plan.balanced_layout import BalancedLayout, check_layout
from ring_attn_core.problem.options import Options
from ring_attn_core.problem.strategies import name_of
from ring_attn_core.validation import in_words

from ..attend.keys import clip
from ..attend.one_run import impossible, limits
from .prepare import Arrays


@partial(jax.tree_util.register_dataclass, meta_fields=["length"], data_fields=["table"])
@dataclass(frozen=True)
class TracedLayout:
    """A balanced layout that a jitted function takes as an argument. Make it with ``TracedLayout.of(shard.layout)``.

    ``table`` int32 [ranks, seq_local]: the position of each rank's tokens, in ascending order. ``length``: number of tokens
    without padding; positions from ``length`` on are padding.
    """

    table: jax.Array
    length: int

    @classmethod
    def of(cls, layout: BalancedLayout) -> TracedLayout:
        """Convert ``layout``. Raise ValueError if it is not a BalancedLayout, or if the positions of a rank do not ascend."""
        if not isinstance(layout, BalancedLayout) or not layout.ascends:
            raise ValueError(
                "TracedLayout.of takes a BalancedLayout whose runs are in order of position, the .layout of a shard of "
                f'shard_batch(..., layout="balanced"), got {in_words(layout)}'
            )
        return cls(jnp.asarray(every_position(layout)), layout.length)

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self.table.shape[0]

    @property
    def seq_local(self) -> int:
        """Return the number of tokens of each rank, padding included."""
        return self.table.shape[1]

    def check(self, ranks: object, length: object) -> None:
        """Raise ValueError if this layout has another number of ranks than ``ranks``, or another length than ``length``."""
        check_layout(self, ranks, length)


def trace_layout(options: Options, layout: TracedLayout, arrays: Arrays, shape: tuple[int, ...], axis_name: str | None) -> Any:
    """Return ``options`` and ``arrays`` of a call in ``layout``, converted to those of a call on contiguous shards.

    The new arrays hold the layout's positions, and extents that express the mask and hide the padding. ``shape``: the shape of q,
    of this rank's shard, or of the global array if ``axis_name`` is None.
    """
    ranks, local = layout.table.shape
    for name in ("length", "kv_length"):
        if (value := getattr(options, name)) is not None:
            layout.check(ranks, value)
    if len(shape) == 4 and shape[1] != (local if axis_name else ranks * local):
        raise ValueError(
            f"a shard of this layout has {local} tokens on each of {ranks} ranks, got {shape[1]} in q: shard with to_layout, by "
            "this layout"
        )
    if (name := name_of(options.strategy)) not in ("ring", "two_way", "two_level"):
        raise ValueError(
            f'strategy={name!r} does not run a TracedLayout: pass "ring", "two_way" or TwoLevel, or the shard.layout that the '
            "TracedLayout was made of"
        )
    if options.order == "global":
        raise ValueError('order="global" does not run a TracedLayout: pass the shard.layout that it was made of')
    table = jnp.where(layout.table < layout.length, layout.table, BEYOND)
    at = table[lax.axis_index(axis_name)] if axis_name else table.reshape(-1)
    least, most = limits(at, options.mask.clamped(ranks * local))
    most = jnp.where(at[:, None] == BEYOND, 0, jnp.minimum(most, layout.length))
    held = arrays.extents
    if held is None:
        held = jnp.broadcast_to(jnp.array([0, layout.length], jnp.int32), (*shape[:2], 2))
    wrong = impossible(held, at)[..., None]
    extents = jnp.where(wrong, jnp.array([-1, layout.length], jnp.int32), jnp.clip(clip(held), least, most))
    plain = replace(options, layout="contiguous", mask=full(), length=None, kv_length=None)
    return plain, arrays._replace(extents=extents, positions=table.reshape(-1))


def every_position(layout: BalancedLayout) -> np.ndarray:
    """Return the position of each token of each rank, int32 [ranks, seq_local]."""
    held = [np.arange(start, start + length, dtype=np.int32) for runs in layout.runs for start, length in runs]
    return np.concatenate([np.empty(0, np.int32), *held]).reshape(layout.ranks, layout.seq_local)
