"""Ring attention as the ``attention_fn`` of flax's attention modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from ring_attn_core.layouts import padded_local
from ring_attn_core.masks import full
from ring_attn_core.problem.options import Options
from ring_attn_core.runs import Band

from ..attend.dropout import DropoutState, dropout_state
from ..call.prepare import Arrays
from ..data.extents import on_host, whole
from ..sharded import ShardedAxes, run_sharded
from .dense_mask import mask_arguments, visible_of


def attention_fn(
    *,
    mesh: Mesh | AbstractMesh,
    axis_name: str = "seq",
    batch_axes: str | Sequence[str] = (),
    head_axis: str | None = None,
    layout: str = "contiguous",
    mask: Band = full(),
    softcap: float | None = None,
    strategy: str = "auto",
    order: str = "ring",
    backend: str = "auto",
    deterministic: bool = False,
) -> Callable[..., jax.Array]:
    """Return an ``attention_fn`` for ``flax.nnx.MultiHeadAttention`` and linen's ``MultiHeadDotProductAttention``.

    Such a module then takes and returns global arrays [batch..., tokens, features] as before. Its attention is
    :func:`sharded_ring_attention` over the axes of ``mesh``, with the arguments passed here. ``layout``: the order of the tokens
    in the arrays. "contiguous" is the natural order, for any number of tokens; ``to_layout`` permutes arrays to another layout.
    ``mask``: a band, such as ``causal()``, that applies to all calls. It refers to global positions in any layout.

    The function takes all arguments that the modules of flax 0.12.2 to 0.12.12 pass:
        - ``is_causal``: the call also hides all keys after the query, in global positions.
        - ``mask``, broadcasting against [batch..., heads, queries, keys], with queries and keys in the order of ``layout``: for
          padding, causality, windows or documents. The mask must be the same for all heads. Each query must see one interval of
          keys, apart from keys that the mask hides from all queries. Any other mask is refused. Under jit the mask's values are
          unknown, so a query that breaks these rules gets NaN instead. A query that sees no key gets 0; in flax it gets the mean
          of all values.
        - ``dropout_rng``, ``dropout_rate``, ``deterministic``: a call drops the same probabilities on any mesh, but not those
          that flax would drop. ``broadcast_dropout=True``, flax's default, is refused if there is dropout.
        - ``dtype``, ``promote_dtype``: q, k and v are cast. ``precision``, ``force_fp32_for_softmax``: accepted without effect,
          since the softmax is in at least float32 anyway, and products keep the inputs' full precision except with
          ``backend="triton_tf32"``.
        - ``bias``, ``module`` (``sow_weights=True``), ``input_positions``, ``qk_attn_weights_einsum`` and
          ``attn_weights_value_einsum`` are refused.

    For a module with ``decode=True`` leave ``layout``, ``mask`` and ``is_causal`` at their defaults. Such a module passes one
    query at a time, which counts as position 0, and hides later keys by its own mask. Its calls are refused if ``mask`` or
    ``is_causal`` is not the default.

    Raise ValueError if an argument is refused, the mesh lacks an axis, or sharded_ring_attention raises.
    """
    where = ShardedAxes.of(mesh, axis_name, batch_axes, head_axis)
    same = {"strategy": strategy, "order": order, "backend": backend, "deterministic": deterministic}
    return RingAttentionFunction(where, Options(layout=layout, mask=mask, softcap=softcap, **same))


Triple = tuple[jax.Array, jax.Array, jax.Array]


class DropoutArguments(NamedTuple):
    """The dropout arguments that flax passes in a call with dropout."""

    rng: jax.Array | None
    rate: float
    broadcast: bool


@dataclass(frozen=True)
class FlaxFunction:
    """The base class of attention functions for flax. Functions with equal fields compare equal, so jit compiles only once."""

    where: ShardedAxes
    options: Options

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        promote_dtype: Callable[..., Any] | None = None,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = False,
        qk_attn_weights_einsum: Callable[..., Any] | None = None,
        attn_weights_value_einsum: Callable[..., Any] | None = None,
        input_positions: jax.Array | None = None,
    ) -> jax.Array:
        """Return attention [batch..., tokens, heads, v_dim]; :func:`attention_fn` describes the arguments."""
        never = bias, module, qk_attn_weights_einsum, attn_weights_value_einsum, input_positions
        for (name, why), refused in zip(REFUSED.items(), never, strict=True):
            if refused is not None:
                raise ValueError(f"{name} is given, and ring attention cannot honour it: {why}")
        if promote_dtype is not None:
            query, key, value = promote_dtype((query, key, value), dtype=dtype)
        dtype = jnp.result_type(query, key, value) if dtype is None else dtype
        q, k, v = (_one_batch(x).astype(dtype) for x in (query, key, value))
        band = self.options.mask
        options = replace(self.options, mask=Band(max(band.lo or 0, 0), band.hi) if is_causal else band)
        drops = dropout_rate and not deterministic
        dropout = DropoutArguments(dropout_rng, dropout_rate, broadcast_dropout) if drops else None
        visible = None
        if mask is not None:
            if q.shape[1] == 1 < k.shape[1] and options.mask != full():
                raise ValueError(
                    "mask= of the module is for one query and several keys, as with decode=True, and "
                    f"{'is_causal=True' if is_causal else 'mask= of attention_fn'} would count this query as position 0: leave "
                    "it out for decoding, since the module hides later keys itself"
                )
            visible = visible_of(jnp.asarray(mask), (*query.shape[:-3], q.shape[2], q.shape[1], k.shape[1]))
        return self._attended((q, k, v), visible, dropout, options).reshape(*query.shape[:-1], value.shape[-1])

    def _attended(self, qkv: Triple, visible: jax.Array | None, dropout: DropoutArguments | None, options: Options) -> jax.Array:
        """Return attention [batch, tokens, heads, v_dim] of (q, k, v). ``visible``: a mask from ``visible_of``, or None."""
        raise NotImplementedError

    def _padded(self, x: Any) -> Any:
        """Pad ``x`` [batch, tokens, ...] with zeros to a multiple of the number of ranks. None stays None."""
        if x is None or not x.shape[1] % self.where.ranks:
            return x
        more = padded_local("contiguous", self.where.ranks, x.shape[1]) * self.where.ranks - x.shape[1]
        return jnp.pad(x, [(0, 0), (0, more), *[(0, 0)] * (x.ndim - 2)])

    @staticmethod
    def _first(tokens: int, out: jax.Array) -> jax.Array:
        """Return the first ``tokens`` tokens of ``out`` [batch, tokens, ...], all-gathered: a slice cannot keep a sharding."""
        return out if out.shape[1] == tokens else whole(out, 1)[:, :tokens]


class RingAttentionFunction(FlaxFunction):
    """Ring attention as an ``attention_fn`` of flax: the module's mask becomes extents and a key mask."""

    def _attended(self, qkv: Triple, visible: jax.Array | None, dropout: DropoutArguments | None, options: Options) -> jax.Array:
        arrays = Arrays(dropout_seed=None if dropout is None else _dropout_state(dropout))
        options = replace(options, dropout_rate=0.0 if dropout is None else dropout.rate)
        if visible is None:
            return self._over_the_mesh(*qkv, arrays, options)
        extents, key_mask, fits = mask_arguments(visible, self.options.layout, self.where.ranks)
        check_fits(
            fits,
            "be the same for all heads and, apart from keys hidden from all queries, one interval of keys for each query, in the "
            "order of the arrays",
            "Bands are mask= of attention_fn",
        )
        return nan_unless(fits, self._over_the_mesh(*qkv, arrays._replace(extents=extents, key_mask=key_mask), options))

    def _over_the_mesh(self, q: jax.Array, k: jax.Array, v: jax.Array, arrays: Arrays, options: Options) -> jax.Array:
        """Return out [batch, tokens, heads, v_dim]. In layout "contiguous" pad inputs to equal shards, then drop the padding."""
        if options.layout != "contiguous":
            return run_sharded(q, k, v, arrays, options, self.where)
        queries, keys = q.shape[1], k.shape[1]
        optional = {name: self._padded(getattr(arrays, name)) for name in ("extents", "key_mask")}
        options = replace(options, length=queries, kv_length=keys)
        q, k, v = (self._padded(x) for x in (q, k, v))
        return self._first(queries, run_sharded(q, k, v, arrays._replace(**optional), options, self.where))


REFUSED = {
    "bias": "scores take none; biases by position are alibi_slopes of sharded_ring_attention",
    "module": "sow_weights=True asks for the weights of attention, tokens times tokens, which are never made",
    "qk_attn_weights_einsum": "the products are the backend's own",
    "attn_weights_value_einsum": "the products are the backend's own",
    "input_positions": "they are for rotary embeddings, which RingAttention has",
}
"""Arguments of flax that must be None, and the reason for each."""


def _one_batch(x: jax.Array) -> jax.Array:
    return x if x.ndim == 4 else x.reshape(-1, *x.shape[-3:])


def _dropout_state(dropout: DropoutArguments) -> DropoutState:
    if dropout.broadcast:
        raise ValueError(
            "broadcast_dropout=True drops the same probabilities in all rows and heads, and ring attention draws for each by "
            "itself: pass broadcast_dropout=False to the module"
        )
    if dropout.rng is None:
        raise ValueError("dropout_rate above 0 without deterministic needs dropout_rng: pass the module its rngs")
    return dropout_state(jax.random.bits(dropout.rng), (0, 0))


def check_fits(fits: jax.Array | None, must: str, instead: str) -> None:
    """Raise ValueError if ``fits`` [batch, queries] is known and False for a query. ``must``, ``instead``: parts of the text."""
    values = None if fits is None else on_host(fits)
    if values is not None and not values.all():
        row, query = (int(i) for i in np.argwhere(~values)[0])
        raise ValueError(f"mask must {must}; it is not for query {query} of batch row {row}. {instead}")


def nan_unless(fits: jax.Array | None, out: jax.Array) -> jax.Array:
    """Return ``out`` [batch, tokens, heads, dim] with NaN at queries that ``fits`` [batch, tokens] marks False under jit."""
    return out if fits is None else out * jnp.where(fits, 1, jnp.nan).astype(out.dtype)[..., None, None]
