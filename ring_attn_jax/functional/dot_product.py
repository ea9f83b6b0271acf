"""``jax.nn.dot_product_attention`` over a ring.

``data/dense_masks.py`` of the core converts a mask that the host can read to a band, extents, key extents and a key mask. A
traced mask becomes extents and key extents inside the program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ring_attn_core.data.dense_masks import HEADS_DIFFER, NEITHER, DenseMaskArguments, both, dense_mask_arguments
from ring_attn_core.keywords import named_keywords
from ring_attn_core.layouts import find_layout
from ring_attn_core.masks import causal, full
from ring_attn_core.model.checks import check_flags
from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.runs import Band, Run
from ring_attn_core.validation import as_number, in_words, is_integer

from ..axes import ring_size
from ..block import attend_block
from ..call.signature import ring_attention
from ..data.extents import on_host

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int

BACKENDS = {None: "auto", "xla": "blockwise"}


@named_keywords
def dot_product_attention(
    query: Float[Array, "*batch seq_local heads head_dim"],
    key: Float[Array, "*batch kv_local kv_heads head_dim"],
    value: Float[Array, "*batch kv_local kv_heads head_dim"],
    bias: Array | None = None,
    mask: Bool[Array, "*scores"] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, " batch"] | None = None,
    key_value_seq_lengths: Int[Array, " batch"] | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    axis_name: str | None = "seq",
    layout: str = "zigzag",
    length: int | None = None,
    kv_length: int | None = None,
) -> Any:
    """Compute ``jax.nn.dot_product_attention`` over a ring, with gradients.

    Call it inside ``jax.shard_map`` over ``axis_name``.

    query, key, value: this rank's shards, ``[batch, tokens, heads, head_dim]`` or all three without the batch. ``is_causal``:
    query i sees the keys j <= i, even if the numbers of queries and keys differ. ``local_window_size``: (left, right), the
    numbers of keys that a query sees before and after its position, or one int for both. ``query_seq_lengths``,
    ``key_value_seq_lengths``: integers ``[batch]``, the numbers of queries or keys in each row without padding, over all ranks.

    ``mask``: the global mask in natural order, the same on every rank. It is bool, True for each permitted pair. It broadcasts
    against [batch, heads, length, kv_length] and must be the same for all heads. Apart from unused keys (padding), it must be a
    band (causal or a sliding window), or restrict each query to an interval of keys, each key to an interval of queries, or both.
    Masks of documents, prefixes and prefix trees have this form. A mask that jit traces has no values yet and is not checked: out
    and lse are NaN for each query whose row of the mask differs between heads or lacks this form.

    ``implementation``: None chooses the backend, "xla" is plain JAX. ``return_residual``: also return lse, in key's dtype and
    without a gradient, as in JAX. ``axis_name``: the mesh axis of the ring; None is one device, without a mesh. ``layout``,
    ``length``, ``kv_length``: as in :func:`ring_attention`.

    A query that sees no key has out 0 and lse -inf, as with JAX's "cudnn"; JAX's "xla" returns the mean of all values instead,
    except for queries beyond ``query_seq_lengths``.

    Raise ValueError if a ``bias`` is passed, if a flag is neither True nor False, if ``implementation`` is neither None nor
    "xla", or if a mask with known values differs between heads or does not have the form described above. Raise it too if
    ring_attention refuses an argument.
    """
    check_flags(is_causal=as_number(is_causal), return_residual=as_number(return_residual))
    if bias is not None:
        raise ValueError(
            "bias would have to travel round the ring: pass a mask of True and False as mask=; biases by position are "
            "alibi_slopes of ring_attention"
        )
    if implementation not in BACKENDS:
        raise ValueError(
            f"implementation={implementation!r} has no counterpart in JAX here: pass None, which takes the Triton kernels on "
            'NVIDIA GPUs, or "xla"'
        )
    unbatched = getattr(query, "ndim", 4) == 3
    q, k, v = (_batch(name, x, unbatched) for name, x in (("query", query), ("key", key), ("value", value)))
    shards = Shards.of(q, k, axis_name, layout, (length, kv_length))
    parts, fits = DenseMaskArguments(full()), None
    if mask is not None:
        parts, fits = _mask_arguments_of(mask, (q.shape[0], q.shape[2], *shards.lengths))
    band = both(both(parts.band, causal() if is_causal else full()), _window(local_window_size))
    extents = shards.own(parts.extents, 0)
    if query_seq_lengths is not None or key_value_seq_lengths is not None:
        extents = shards.within(extents, query_seq_lengths, key_value_seq_lengths, q.shape[0])
    whole_batch = lambda x: None if x is None else jnp.broadcast_to(x, (q.shape[0], *x.shape[1:]))
    arguments: dict[str, Any] = {"extents": extents, "key_extents": shards.own(parts.key_extents, 1)}
    arguments = {name: whole_batch(x) for name, x in (arguments | {"key_mask": shards.own(parts.key_mask, 1)}).items()}
    out, lse = shards.attend((q, k, v), {**arguments, "mask": band, "scale": scale, "backend": BACKENDS[implementation]})
    if fits is not None:
        known = jnp.where(jnp.asarray(shards.own(~fits, 0)), jnp.nan, 1)[..., None]
        out, lse = out * known.astype(out.dtype)[..., None], lse * known.astype(lse.dtype)
    out, lse = (x[0] if unbatched else x for x in (out, lse))
    return (out, lax.stop_gradient(lse.astype(key.dtype))) if return_residual else out


class Shards(NamedTuple):
    """The sharding of q and k over a mesh axis (None: one device), with ``local`` and global numbers of queries and of keys."""

    axis_name: str | None
    ranks: int
    layout: str
    local: tuple[int, int]
    lengths: tuple[int, int]

    @classmethod
    def of(cls, q: Any, k: Any, axis_name: str | None, layout: str, lengths: tuple[int | None, int | None]) -> Shards:
        """Return the Shards of q and k [batch, tokens, heads, head_dim]."""
        find_layout(layout)
        instead = "pass axis_name=None for one device"
        ranks = 1 if axis_name is None else ring_size(axis_name, "functional.dot_product_attention", instead)
        layout = layout if ranks > 1 else "contiguous"  # for one rank all layouts are the same, and this one is never padded
        plan = RingPlan(layout, full(), ranks, q.shape[1], k.shape[1], *lengths)  # type: ignore[arg-type]
        return cls(axis_name, ranks, layout, (q.shape[1], k.shape[1]), (plan.length, plan.kv_length))

    def positions(self, side: int) -> jax.Array:
        """Return the positions of this rank's tokens, int32 [tokens]. ``side``: 0 for the queries, 1 for the keys."""
        rank = 0 if self.axis_name is None else lax.axis_index(self.axis_name)
        runs = find_layout(self.layout)(rank, self.ranks, self.local[side])  # type: ignore[arg-type]  # arithmetic on a traced rank
        return jnp.concatenate([run.start + run.stride * jnp.arange(run.length, dtype=jnp.int32) for run in runs])

    def own(self, x: Any, side: int) -> jax.Array | None:
        """Return this rank's shard of a global array [rows, length, ...], padded with 0. ``side``: 0 for queries, 1 for keys."""
        if x is None:
            return None
        more = self.ranks * self.local[side] - x.shape[1]
        padded = jnp.pad(jnp.asarray(x), [(0, 0), (0, more), *[(0, 0)] * (x.ndim - 2)])
        return jnp.take(padded, self.positions(side), 1)

    def within(self, extents: jax.Array | None, queries: Any, keys: Any, batch: int) -> jax.Array:
        """Limit ``extents`` [batch, tokens, 2] (None: all) to keys that are not padding; padded queries get an empty interval.

        ``queries``, ``keys`` [batch]: the numbers of queries and of keys in each row without padding; None: no padding.
        """
        if extents is None:
            extents = jnp.broadcast_to(jnp.array([0, self.lengths[1]], jnp.int32), (1, self.local[0], 2))
        first, end = extents[..., 0], extents[..., 1]
        if keys is not None:
            end = jnp.minimum(end, _row_lengths("key_value_seq_lengths", keys, batch))
        if queries is not None:
            end = jnp.where(self.positions(0)[None] < _row_lengths("query_seq_lengths", queries, batch), end, 0)
        first, end = jnp.broadcast_arrays(first, end)
        return jnp.where((first < end)[..., None], jnp.stack([first, end], -1), 0)

    def attend(self, qkv: tuple[Any, Any, Any], arguments: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        """Compute (out, lse) of this rank's queries, out in q's dtype. ``arguments``: other keywords of ``ring_attention``."""
        if self.axis_name is not None:
            lengths = {"length": self.lengths[0], "kv_length": self.lengths[1]}
            return ring_attention(*qkv, axis_name=self.axis_name, layout=self.layout, **lengths, **arguments, return_lse=True)
        queries, keys = (Run(0, length) for length in self.lengths)
        out, lse = attend_block(*qkv, q_run=queries, k_run=keys, **arguments)
        return out.astype(qkv[0].dtype), lse


def _batch(name: str, x: Any, unbatched: bool) -> jax.Array:
    if not hasattr(x, "ndim") or x.ndim != (3 if unbatched else 4):
        raise ValueError(f"{name} must be [batch, tokens, heads, head_dim], or all three without the batch, got {in_words(x)}")
    return x[None] if unbatched else x


def _row_lengths(name: str, x: Any, batch: int) -> jax.Array:
    x = jnp.asarray(x)
    if x.shape != (batch,) or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers [batch] = [{batch}], the tokens of each row, got {x.dtype} {list(x.shape)}")
    return x.astype(jnp.int32)[:, None]


def _window(size: Any) -> Band:
    if size is None:
        return full()
    sides = (size, size) if is_integer(size) else size
    if not isinstance(sides, tuple | list) or len(sides) != 2 or not all(map(is_integer, sides)):
        raise ValueError(f"local_window_size must be an int or (left, right), static ints in tokens, got {in_words(size)}")
    left, right = sides
    return Band(-right, left)


def _mask_arguments_of(mask: Any, shape: tuple[int, int, int, int]) -> tuple[DenseMaskArguments, Any]:
    """Return the ring arguments of a global mask, and bool [rows, queries]: True for each query whose mask they express exactly.

    The second is None if the host can read the mask: they fit every query. ``shape``: (batch, heads, length, kv_length).
    """
    sizes = (*[1] * (4 - getattr(mask, "ndim", 0)), *getattr(mask, "shape", ()))
    if len(sizes) != 4 or not hasattr(mask, "ndim") or any(n not in (1, m) for n, m in zip(sizes, shape, strict=True)):
        raise ValueError(
            f"mask must be whole, in natural order, and broadcast against [batch, heads, length, kv_length] = {list(shape)}, got "
            f"{in_words(mask)}: pass length= and kv_length= if the shards are padded"
        )
    if mask.dtype != bool:
        raise ValueError(f"mask must be bool, True where attention is permitted, got {mask.dtype}: of 0 and -inf pass mask == 0")
    rows, queries, keys = sizes[0], *shape[2:]
    values = on_host(mask)
    if values is None:
        visible = jnp.broadcast_to(jnp.reshape(mask, sizes), (*sizes[:2], queries, keys))
        parts, fits = _trace_mask_arguments(visible[:, 0])
        return parts, fits & (visible == visible[:, :1]).all((1, 3))
    visible = values.reshape(sizes)
    if not (visible == visible[:, :1]).all():
        raise ValueError(f"mask {HEADS_DIFFER}")
    import numpy as np

    parts = dense_mask_arguments(np.broadcast_to(visible[:, 0], (rows, queries, keys)))
    if parts is None:
        raise ValueError(f"mask {NEITHER}")
    return parts, None


def _trace_mask_arguments(visible: jax.Array) -> tuple[DenseMaskArguments, jax.Array]:
    """Return the tightest extents around ``visible`` [rows, queries, keys], and bool [rows, queries]: True if they are exact."""
    extents, key_extents = _hull(visible), _hull(visible.swapaxes(1, 2))
    query = jnp.arange(visible.shape[1], dtype=jnp.int32)[None, :, None]
    key = jnp.arange(visible.shape[2], dtype=jnp.int32)[None, None]
    rows = (extents[..., :1] <= key) & (key < extents[..., 1:])
    columns = (key_extents[:, None, :, 0] <= query) & (query < key_extents[:, None, :, 1])
    return DenseMaskArguments(full(), extents, key_extents), ((rows & columns) == visible).all(2)


def _hull(visible: jax.Array) -> jax.Array:
    """Return the tightest interval around the True entries of the last dimension, int32 [..., 2]; [0, 0) if all are False."""
    if not visible.shape[-1]:
        return jnp.zeros((*visible.shape[:-1], 2), jnp.int32)
    first, end = jnp.argmax(visible, -1), visible.shape[-1] - jnp.argmax(visible[..., ::-1], -1)
    return jnp.where(visible.any(-1)[..., None], jnp.stack([first, end], -1), 0).astype(jnp.int32)
