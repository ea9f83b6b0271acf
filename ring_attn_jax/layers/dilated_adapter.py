"""Dilated attention as the ``attention_fn`` of flax's attention modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from ring_attn_core.masks import full
from ring_attn_core.problem.options import Options
from ring_attn_core.runs import Band
from ring_attn_core.variants.dilated import Patterns

from ..data.extents import whole
from ..sharded import ShardedAxes
from ..variants.sharded_dilated import sharded_dilated_attention
from .adapters import DropoutArguments, FlaxFunction, Triple, check_fits, nan_unless


def dilated_attention_fn(
    *,
    mesh: Mesh | AbstractMesh,
    segments: Sequence[int],
    dilations: Sequence[int],
    mixing: str = "softmax",
    axis_name: str = "seq",
    batch_axes: str | Sequence[str] = (),
    head_axis: str | None = None,
    mask: Band = full(),
    softcap: float | None = None,
    strategy: str = "auto",
    backend: str = "auto",
    deterministic: bool = False,
) -> Callable[..., jax.Array]:
    """Return an ``attention_fn`` for ``flax.nnx.MultiHeadAttention`` and linen's ``MultiHeadDotProductAttention``.

    Such a module then takes and returns global arrays [batch..., tokens, features] in natural order, of any length, as before.
    Its attention is :func:`sharded_dilated_attention` over the axes of ``mesh``, with the arguments passed here. With dilation 1
    and one segment that covers the sequence, it is exact attention.

    The function takes all arguments that flax's modules pass, like the function that :func:`attention_fn` returns:
        - ``is_causal``: the call also hides all keys after the query.
        - ``mask``, broadcasting against [batch..., heads, tokens, tokens]: it may hide keys from all queries. It may hide all
          keys from a query; this query's output is then 0. At pairs that ``is_causal`` or the band passed here hides, it may have
          any value. Any other mask is refused. Under jit the mask's values are unknown, so queries that break these rules get
          NaN.
        - Dropout is refused, and so are the arguments that ``attention_fn`` refuses.

    Raise ValueError if an argument is refused, patterns do not fit, the mesh lacks an axis, keys and queries differ in length, or
    sharded_dilated_attention raises.
    """
    where = ShardedAxes.of(mesh, axis_name, batch_axes, head_axis)
    options = Options(
        layout="contiguous", mask=mask, softcap=softcap, strategy=strategy, backend=backend, deterministic=deterministic
    )
    Patterns(segments, dilations, mixing).check()
    return DilatedAttentionFunction(where, options, Patterns(tuple(segments), tuple(dilations), mixing))


@dataclass(frozen=True)
class DilatedAttentionFunction(FlaxFunction):
    """Dilated attention as an ``attention_fn`` of flax."""

    patterns: Patterns

    def _attended(self, qkv: Triple, visible: jax.Array | None, dropout: DropoutArguments | None, options: Options) -> jax.Array:
        if dropout is not None:
            raise ValueError(
                f"dropout_rate={dropout.rate}: dilated attention drops no probabilities, for a query has several of them for one "
                "key, one in each pattern: make the module with dropout_rate=0, or call it with deterministic=True"
            )
        tokens, keys = qkv[0].shape[1], qkv[1].shape[1]
        if tokens != keys:
            raise ValueError(
                f"there are {tokens} queries and {keys} keys: the segments of dilated attention are of one sequence, so pass "
                "equally many; attention_fn takes two sequences"
            )
        seen = VisibleTokens() if visible is None else visible_tokens(visible, options.mask)
        check_fits(
            seen.fits,
            "be the same for all heads and, within mask= of dilated_attention_fn (or is_causal), hide keys from everybody or all "
            "keys from a query",
            "Causal masks and sliding windows are mask= of dilated_attention_fn",
        )
        q, k, v = (self._padded(x) for x in qkv)
        arguments = self.patterns.keywords(options) | {"key_mask": self._padded(seen.keys), "length": tokens}
        out = self._first(tokens, sharded_dilated_attention(q, k, v, **arguments, **self.where._asdict()))
        if seen.queries is not None:
            out = jnp.where(seen.queries[..., None, None], out, 0)
        return nan_unless(seen.fits, out)


class VisibleTokens(NamedTuple):
    """The pairs that a mask and a band both allow, reduced to two sets of tokens, bool [batch, tokens]; None: all True."""

    keys: jax.Array | None = None
    """True for keys that some query sees."""
    queries: jax.Array | None = None
    """True for queries that see some key."""
    fits: jax.Array | None = None
    """True for queries whose visible keys are exactly those that the band, ``keys`` and ``queries`` permit."""


def visible_tokens(visible: jax.Array, band: Band) -> VisibleTokens:
    """Return the ``VisibleTokens`` of the mask ``visible`` [rows, heads, queries, keys] and ``band``; sizes of 1 are for all."""
    visible = whole(whole(visible, 2), 3)
    if visible.shape[1:3] == (1, 1):
        return VisibleTokens(visible[:, 0, 0])
    tokens = visible.shape[3]
    lag = jnp.arange(tokens)[:, None] - jnp.arange(tokens)
    within = jnp.ones_like(lag, bool) if band.lo is None else lag >= band.lo
    within = within if band.hi is None else within & (lag <= band.hi)
    visible = visible & within
    keys, queries = visible.any((1, 2)), visible.any((1, 3))
    said = within & keys[:, None] & queries[..., None]
    return VisibleTokens(keys, queries, (visible == said[:, None]).all((1, 3)))
