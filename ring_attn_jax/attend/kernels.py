"""The backends that run GPU kernels. They prepare the input arrays of each ring step and launch its kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from ring_attn_core.kernels import steps
from ring_attn_core.kernels.call import RingCall
from ring_attn_core.kernels.hopper import launches as hopper
from ring_attn_core.kernels.launch import Launch
from ring_attn_core.kernels.portable import launches as portable
from ring_attn_core.runs import Band

from .backend import sink_gradient
from .keys import Keys, along_tokens, clip
from .launch import launch
from .one_run import as_one_run
from .score import Score
from .state import Arrived, BackwardInputs, Gradients, State


@dataclass(frozen=True)
class Kernels:
    """The backends "triton", "triton_tf32" and "hopper". ``band``: the mask in a balanced layout, None in other layouts."""

    call: RingCall
    band: Band | None = None
    two_arrays: ClassVar[bool] = True

    def attend(self, q: jax.Array, keys: Keys, rows: jax.Array, score: Score, total: State | None, last: bool) -> State:
        """Merge attention to the visible keys into ``total`` by a forward kernel. See ``Backend.attend``."""
        if keys.kv.shape[1] != self.call.kv_local:
            return self._for(keys).attend(q, keys, rows, score, total, last)
        call, own = self.call.of_own_queries, score.query_tiles
        if own is not None:
            q, rows, score = own.take(q), own.rows, _of_own(score)
        arrays = self._arrays(q, keys, rows, score)
        if total is not None:
            arrays |= {name + "_in": x for name, x in total._asdict().items() if x is not None}
        _add_lists(arrays, steps.lists(call, "forward"))
        results = launch(steps.forward(call, total is None, last), arrays)
        return State(*(results if own is None else map(own.put, results)))

    def backward_inputs(
        self, q: jax.Array, keys: Keys, rows: jax.Array, score: Score, total: State, dtotal: State
    ) -> BackwardInputs:
        """Compute delta by a kernel, once for all steps of a backward. See ``Backend.backward_inputs``."""
        (out, lse, rest), (dout, dlse, _) = total, dtotal
        dout = dout.astype(q.dtype)
        if self.call.fully_masked and not steps.zeroes_queries(self.call):
            unseen = (lse == -jnp.inf)[..., None]
            q, dout = jnp.where(unseen, 0, q), jnp.where(unseen, 0, dout)
        blank = None
        if self.call.fully_masked and score.sinks is not None:  # a query that sees no key: it, dout and dlse may hold NaN
            blank = (lse == score.sinks.astype(lse.dtype)[None, None]) & ~out.any(-1)
            q, dout = (_finite(x, blank[..., None]) for x in (q, dout))
        arrays = {"out": out, "lse": lse, "dout": dout, "dlse": dlse}
        if rest is not None:
            arrays["rest"] = rest
        lse2, delta, *factor = launch(portable.delta(self.call, str(out.dtype)), arrays)
        dsinks = sink_gradient(score, total, delta.swapaxes(1, 2))
        if blank is not None:
            delta = _finite(delta, blank.swapaxes(1, 2))
        if factor:
            dout, delta = dout * factor[0].swapaxes(1, 2)[..., None], delta * factor[0]
        bounds = None
        if score.extents is not None and self.band is None:
            (bounds,) = launch(steps.extent_bounds(self.call), self._arrays(q, keys, rows, score))
        return BackwardInputs(q, dout, lse2, delta, dsinks, bounds)

    def attend_backward(
        self, query: BackwardInputs, keys: Keys, rows: jax.Array, score: Score, dq: jax.Array | None, arrived: Arrived, last: bool
    ) -> tuple[jax.Array, Gradients]:
        """Compute a step's gradients: by one Hopper kernel if ``steps.in_one_pass``, else dq by one kernel, dk and dv by another.

        The Hopper kernel sums dq in float32, and another kernel scales and rounds dq after the ``last`` step.
        """
        if keys.kv.shape[1] != self.call.kv_local:
            return self._for(keys).attend_backward(query, keys, rows, score, dq, arrived, last)
        if not steps.in_one_pass(self.call):
            dq = self.attend_dq(query, keys, rows, score, dq, last)
            return dq, self.attend_dkv(query, keys, rows, score, arrived())
        arrays = self._arrays(query.q, keys, rows, score) | {"dout": query.dout, "lse2": query.lse, "delta": query.delta}
        if dq is None:
            dq, arrays["delta"] = _zeros_with(query.delta, hopper.sums_of_dq(self.call))
        arrays["dq_in"] = dq
        self._add_bounds(arrays, query)
        _add_lists(arrays, steps.lists(self.call, "backward"))
        dq, *dkv = launch(hopper.backward(self.call, not self.call.packed), arrays)
        if (before := arrived()) is not None:  # added here, not in the kernel, which runs while they arrive
            dkv = [dkv[0] + before]
        if last:
            (dq,) = launch(hopper.dq(self.call), {"sums": dq})
        return dq, dkv[0] if len(dkv) == 1 else tuple(dkv)

    def attend_dq(
        self, query: BackwardInputs, keys: Keys, rows: jax.Array, score: Score, dq: jax.Array | None, last: bool
    ) -> jax.Array:
        """Return the gradient of q from these keys, plus ``dq`` if not None. After the ``last`` step the sum is in q's dtype."""
        call, own = self.call.of_own_queries, score.query_tiles
        if own is not None:
            query = query._replace(
                q=own.take(query.q), dout=own.take(query.dout), lse=own.take(query.lse, 2), delta=own.take(query.delta, 2)
            )
            rows, score = own.rows, _of_own(score)
        arrays = self._arrays(query.q, keys, rows, score) | {"dout": query.dout, "lse2": query.lse, "delta": query.delta}
        if dq is not None:
            arrays["dq_in"] = dq
        _add_lists(arrays, steps.lists(call, "dq"))
        (dq,) = launch(steps.dq(call, dq is None, last), arrays)
        return dq if own is None else own.put(dq)

    def attend_dkv(
        self, query: BackwardInputs, keys: Keys, rows: jax.Array, score: Score, arrived: jax.Array | None
    ) -> Gradients:
        """Return the gradient of these keys from this rank's queries, plus ``arrived`` if not None, packed like ``keys``."""
        call, own = self.call.of_own_keys, score.key_tiles
        if own is not None:
            keys, rows = along_tokens(own.take, keys), own.rows
        arrays = self._arrays(query.q, keys, rows, score) | {"dout": query.dout, "lse2": query.lse, "delta": query.delta}
        self._add_bounds(arrays, query)
        if arrived is not None:
            arrays["dkv_in"] = arrived
        _add_lists(arrays, steps.lists(call, "dkv"))
        dkv = launch(steps.dkv(call, arrived is None, not call.packed), arrays)
        if own is not None:
            dkv = tuple(map(own.put, dkv))
        return dkv[0] if len(dkv) == 1 else dkv

    def _for(self, keys: Keys) -> Kernels:
        """Return this backend for key shards of the length of ``keys``, which "direct" in a balanced layout may change."""
        return replace(self, call=self.call.of_keys(keys.kv.shape[1]))

    def _arrays(self, q: jax.Array, keys: Keys, rows: jax.Array, score: Score) -> dict[str, jax.Array]:
        """Return the input arrays of a step's launches by name, converted to one run per shard in a balanced layout."""
        if self.band is not None:
            rows, keys, score = as_one_run(rows, keys, score, q.shape[1], self.band)
        return _arrays(q, keys, rows, score)

    def _add_bounds(self, arrays: dict[str, jax.Array], query: BackwardInputs) -> None:
        """Add the ``bounds`` of extents to ``arrays``; a step computes them if its extents are local indices of its key shard."""
        if query.bounds is not None:
            arrays["bounds"] = query.bounds
        elif "extents" in arrays:
            (arrays["bounds"],) = launch(steps.extent_bounds(self.call), arrays)


def _of_own(score: Score) -> Score:
    """Return a score with the extents of the own queries."""
    own, extents = score.query_tiles, score.extents
    return score if own is None or extents is None else replace(score, extents=own.take(extents))


def _zeros_with(x: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Return (float32 zeros of ``shape``, x), tied by an optimization barrier.

    Otherwise XLA would allocate the zeros of all layers before the first backward, and hold them.
    """
    zero, x = lax.optimization_barrier((jnp.zeros((), jnp.float32), x))
    return jnp.broadcast_to(zero, shape), x


def _finite(x: jax.Array, where: jax.Array) -> jax.Array:
    """Return ``x`` with 0 for NaN and inf where the mask ``where`` is True."""
    return jnp.where(where & ~jnp.isfinite(x), 0, x)


def _add_lists(arrays: dict[str, jax.Array], launches: Iterable[Launch]) -> None:
    """Run launches on ``arrays``, and add their outputs to ``arrays`` by name."""
    for each in launches:
        arrays.update(zip(each.output_names, launch(each, arrays), strict=True))


def _arrays(q: jax.Array, keys: Keys, rows: jax.Array, score: Score) -> dict[str, jax.Array]:
    arrays = {"q": q, "rows": rows}
    if keys.v is None:
        arrays["kv"] = keys.kv
    else:
        arrays["k"], arrays["v"] = keys.kv, keys.v
    if score.extents is not None:
        arrays["extents"] = clip(score.extents)
    if keys.extents is not None:
        arrays["key_extents"] = keys.extents
    if keys.bits is not None:
        arrays["key_mask"], arrays["key_mask_spans"] = launch(
            portable.unpack_key_mask(*keys.kv.shape[:2]), {"key_mask_bits": keys.bits}
        )
    if score.sinks is not None:
        arrays["sinks"] = score.sinks.astype(jnp.float32)
    if score.alibi_slopes is not None:
        arrays["alibi_slopes"] = score.alibi_slopes.astype(jnp.float32)
    if score.dropout_seed is not None:
        (arrays["dropout"],) = launch(
            portable.philox_keys(q.shape[0], q.shape[2]), {"dropout_seed": jnp.stack(score.dropout_seed)}
        )
    return arrays
