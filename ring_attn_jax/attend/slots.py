"""Attention of a few queries over one rank's cache slots, and the merge of the results of several ranks or splits.

    s_ij  = softcap tanh(scale k_scale q_i . k_j / softcap) - slope lag_ij    if query i may see slot j, else -inf
    lse_i = log sum_j exp(s_ij),  out_i = v_scale sum_j exp(s_ij - lse_i) v_j

The lag ``lag_ij`` is the position of query i minus the position of slot j. A result is a packed pair: out and lse in one array [b
n h e+1]. The decode kernel divides a rank's slots into splits and returns one result for each split. The last merge adds the
sinks [h], one more logit in each softmax denominator.

Shapes     q [b n h d], k [b t g d], v [b t g e], positions int32 [b n] and [b t]: n queries, t slots, h query heads, g kv heads.
           The query heads of a kv head are rows of one matrix product
Precision  ``blockwise``: float32 throughout (float64 for float64 queries); for the kernels see the core's portable/decode.py
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ring_attn_core.kernels.decode_call import DecodeCall
from ring_attn_core.kernels.portable import launches
from ring_attn_core.problem.decode import Decode, DecodeArrays

from .launch import launch
from .tiles import accumulation_dtype, dot

CHUNK, CONVERTED = 2**24, 1024
"""The size of a chunk of slots in ``blockwise``: about CHUNK scores, but at least CONVERTED slots.

If k and v must be converted to a wider dtype, a chunk has CONVERTED slots, so that the converted values may fit into a CPU cache.
"""

FEW_ROWS = 128
"""The largest number of rows (queries times heads) for which ``_products`` and ``_sums`` multiply all kv heads at once."""


def by_kernels(arrays: DecodeArrays, call: DecodeCall) -> jax.Array:
    """Run the decode kernel over this rank's slots. Return the packed (out, lse) of each split, float32 [splits b n h e+1]."""
    as_bytes = lambda x: lax.bitcast_convert_type(x, jnp.uint8) if call.fp8 else x
    arguments = {
        "q": arrays.q,
        "k": as_bytes(arrays.k),
        "v": as_bytes(arrays.v),
        "q_positions": arrays.q_positions,
        "k_positions": arrays.k_positions,
    }
    if arrays.tree_mask is not None:
        arguments["tree_mask"] = arrays.tree_mask.astype(jnp.uint8)
        arguments["depths"] = arrays.depths
    for name in ("alibi_slopes", "k_scale", "v_scale"):
        if (x := getattr(arrays, name)) is not None:
            arguments[name] = x.astype(jnp.float32)
    (pairs,) = launch(launches.decode(call), arguments)
    return pairs


def merge_by_kernel(pairs: jax.Array, call: DecodeCall, ranks: int | None) -> jax.Array:
    """Merge packed pairs [pairs b n h e+1], of ``ranks`` ranks or (None) of splits, into one pair [b n h e+1] by a kernel."""
    (pair,) = launch(launches.merge_pairs(call, ranks, False), {"pairs": pairs})
    return pair


def end_by_kernel(pairs: jax.Array, sinks: jax.Array | None, call: DecodeCall, ranks: int | None) -> tuple[jax.Array, jax.Array]:
    """Merge packed pairs [pairs b n h e+1], of ``ranks`` ranks or (None) of splits, and the sinks by a kernel.

    Return out [b n h e] in q's dtype and lse [b n h] in float32.
    """
    arguments = {"pairs": pairs} if sinks is None else {"pairs": pairs, "sinks": sinks.astype(jnp.float32)}
    out, lse = launch(launches.merge_pairs(call, ranks, True), arguments)
    return out, lse


def merge(pairs: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Merge packed (out, lse) pairs [pairs b n h e+1] and the sinks. Return out [b n h e] and lse [b n h] in the pairs' dtype."""
    outs, lses = pairs[..., :-1], pairs[..., -1]
    sinks = None if sinks is None else sinks.astype(lses.dtype)[None, None]
    top = lses.max(0) if sinks is None else jnp.maximum(lses.max(0), sinks)
    top = jnp.where(top == -jnp.inf, 0, top)
    weights = jnp.exp(lses - top[None])
    total = weights.sum(0)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    nothing = total == 0
    total = jnp.where(nothing, 1, total)
    out = (weights[..., None] * outs).sum(0) / total[..., None]
    return out, jnp.where(nothing, -jnp.inf, top + jnp.log(total))


def blockwise(arrays: DecodeArrays, problem: Decode) -> jax.Array:
    """Compute attention over this rank's slots in plain jnp, by chunks; return out and lse packed in one array [b n h e+1]."""
    q, k, v = arrays.q, arrays.k, arrays.v
    (b, n, h, d), (t, g, e) = q.shape, v.shape[1:]
    wide = accumulation_dtype(q.dtype)
    chunk = max(CHUNK // max(b * n * h, 1), CONVERTED) if k.dtype == wide else CONVERTED
    rows = jnp.moveaxis(q.astype(wide).reshape(b, n, g, h // g, d), 1, 2).reshape(b, g, -1, d) * problem.factor
    if arrays.k_scale is not None:
        rows = rows * arrays.k_scale.astype(wide)[None, :, None, None]
    if q.size == 0 or t == 0:
        zeros = jnp.zeros_like(rows, shape=(b, n, h, e + 1))
        return zeros.at[..., -1].set(-jnp.inf)
    depths = None if arrays.tree_mask is None else arrays.depths
    first = t % chunk or chunk

    def visit(start: jax.Array | int, size: int) -> _State:
        part = lambda x: lax.dynamic_slice_in_dim(x, start, size, 1)
        seen = _visible(arrays._replace(k_positions=part(arrays.k_positions)), depths, problem.window)
        return _attend(rows, part(k).astype(wide), part(v).astype(wide), seen, _Score(arrays.alibi_slopes, problem.softcap))

    state = visit(0, first)
    if t > first:
        step = lambda state, start: (state.joined(visit(start, chunk)), None)
        state, _ = lax.scan(step, state, jnp.arange(first, t, chunk, dtype=jnp.int32))
    pair = state.pair()
    if arrays.v_scale is not None:
        pair = pair.at[..., :-1].multiply(arrays.v_scale.astype(wide)[None, :, None, None])
    return jnp.moveaxis(pair.reshape(b, g, n, h // g, e + 1), 1, 2).reshape(b, n, h, e + 1)


class _Visibility(NamedTuple):
    """The visibility mask, bool [b n slots], and the lags (query position - slot position), int32 [b n slots]."""

    visible: jax.Array
    lag: jax.Array


class _Score(NamedTuple):
    """The parameters of a score besides q, k and the scales, which the query rows already hold."""

    alibi_slopes: jax.Array | None
    softcap: float | None


class _State(NamedTuple):
    """The online-softmax state over some slots; kv head g has a row for each pair of a query and a query head of g.

    ``top`` [b g rows]: the row max. ``total`` [b g rows]: sum of exp(s - top). ``acc`` [b g rows e]: sum of exp(s - top) v.
    """

    top: jax.Array
    total: jax.Array
    acc: jax.Array

    def joined(self, other: _State) -> _State:
        top = jnp.maximum(self.top, other.top)
        shift = jnp.where(top == -jnp.inf, 0, top)
        mine, theirs = jnp.exp(self.top - shift), jnp.exp(other.top - shift)
        acc = self.acc * mine[..., None] + other.acc * theirs[..., None]
        return _State(top, self.total * mine + other.total * theirs, acc)

    def pair(self) -> jax.Array:
        """Return out and lse packed in one array [b g rows e+1]."""
        nothing = self.total == 0
        total = jnp.where(nothing, 1, self.total)
        lse = jnp.where(nothing, -jnp.inf, self.top + jnp.log(total))
        return jnp.concatenate([self.acc / total[..., None], lse[..., None]], -1)


def _visible(arrays: DecodeArrays, depths: jax.Array | None, window: int | None) -> _Visibility:
    position, i = arrays.k_positions[:, None], arrays.q_positions[..., None]
    if depths is None:
        lag = i - position
        visible = (lag >= 0) & (position >= 0)
    else:
        n = i.shape[1]
        node = arrays.k_positions - arrays.q_positions[:, :1]
        inside = ((node >= 0) & (node < n) & (arrays.k_positions >= 0))[:, None]
        node = jnp.clip(node, 0, n - 1)
        key_depth = jnp.take_along_axis(depths, node, 1)[:, None]
        among = jnp.take_along_axis(arrays.tree_mask, node[:, None], 2)
        lag = depths[..., None] - jnp.where(inside, key_depth, position)
        visible = jnp.where(inside, among, (position >= 0) & (position < i[:, :1]))
    return _Visibility(visible if window is None else visible & (lag <= window), lag)


def _attend(rows: jax.Array, keys: jax.Array, values: jax.Array, visibility: _Visibility, score: _Score) -> _State:
    """Return the state of the queries ``rows`` [b g rows d] over one chunk of c slots.

    ``keys`` [b c g d], ``values`` [b c g e]. If v is NaN in a slot that no query sees, compute the product with 0 there.
    """
    (b, g, m, _), n = rows.shape, visibility.visible.shape[1]
    s = _products(rows, keys)
    if score.softcap is not None:
        s = score.softcap * jnp.tanh(s / score.softcap)
    s = s.reshape(b, g, n, m // n, -1)
    if score.alibi_slopes is not None:
        slopes = score.alibi_slopes.astype(s.dtype).reshape(1, g, 1, m // n, 1)
        s = s - slopes * visibility.lag[:, None, :, None].astype(s.dtype)
    s = jnp.where(visibility.visible[:, None, :, None], s, -jnp.inf).reshape(b, g, m, -1)
    top = s.max(-1)
    p = jnp.exp(s - jnp.where(top == -jnp.inf, 0, top)[..., None])
    product = _sums(p, values)
    read = visibility.visible.any(1)[..., None, None]
    zeroed = lambda: _sums(p, jnp.where(read, values, 0))
    return _State(top, p.sum(-1), lax.cond(jnp.isfinite(product).all(), lambda: product, zeroed))


def _products(rows: jax.Array, keys: jax.Array) -> jax.Array:
    """Return q . k [b g rows c] of the queries ``rows`` [b g rows d] and keys [b c g d].

    For a product batched over kv heads XLA copies k head by head: 87 ms on one core for 16,384 slots with 8 kv heads of dimension
    128. At most ``FEW_ROWS`` rows are one matrix [g * rows, g * d] with zeros for other kv heads instead: 18 ms.
    """
    b, g, m, d = rows.shape
    if g * m > FEW_ROWS:
        return dot("bgmd,bcgd->bgmc", rows, keys)
    mine = jnp.eye(g, dtype=bool)[None, :, None, :, None]
    by_head = jnp.where(mine, rows[:, :, :, None], 0).reshape(b, g * m, g * d)
    return dot("bmd,bcd->bmc", by_head, keys.reshape(*keys.shape[:2], g * d)).reshape(b, g, m, -1)


def _sums(p: jax.Array, values: jax.Array) -> jax.Array:
    """Return p v [b g rows e] of probabilities [b g rows c] and values [b c g e]."""
    b, g, m, c = p.shape
    if g * m > FEW_ROWS:
        return dot("bgmc,bcge->bgme", p, values)
    every_head = dot("bmc,bce->bme", p.reshape(b, g * m, c), values.reshape(b, c, -1)).reshape(b, g, m, g, -1)
    each = jnp.arange(g)
    return jnp.moveaxis(every_head[:, each, :, each], 0, 1)
