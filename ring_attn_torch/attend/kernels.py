"""The backends that run GPU kernels. They prepare the input arrays of each ring step and launch its kernels."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from ring_attn_core.dropout import WORD
from ring_attn_core.kernels import steps
from ring_attn_core.kernels.call import RingCall
from ring_attn_core.kernels.hopper import launches as hopper
from ring_attn_core.kernels.launch import Launch
from ring_attn_core.kernels.portable import launches as portable
from ring_attn_core.runs import Band

from .backend import sink_gradient
from .keys import Keys, along_tokens, clip, zero_where
from .launch import align, launch
from .one_run import as_one_run
from .recent import Unchanged, beside_capture, reusable, stream_of
from .score import Score
from .state import Arrived, BackwardInputs, Gradients, State
from .tiles import Rows


@dataclass(frozen=True)
class Kernels:
    """The backends "triton", "triton_tf32" and "hopper". ``band``: the mask in a balanced layout, None in other layouts."""

    call: RingCall
    band: Band | None = None
    two_arrays: ClassVar[bool] = True

    def attend(self, q: Tensor, keys: Keys, rows: Rows, score: Score, total: State | None, last: bool) -> State:
        """Merge attention to the visible keys into ``total`` by a forward kernel. See ``Backend.attend``."""
        if keys.kv.shape[1] != self.call.kv_local:
            return self._for(keys).attend(q, keys, rows, score, total, last)
        call, own = self.call.of_own_queries, score.query_tiles
        if own is not None:
            q, rows, score = own.take(q), own.rows, _of_own(score)
        arrays = self._arrays(q, keys, rows, score)
        if total is not None:
            arrays |= {name + "_in": x for name, x in total._asdict().items() if x is not None}
        _add_lists(arrays, steps.lists(call, "forward"), shared=own is None)
        results = launch(steps.forward(call, total is None, last), arrays)
        return State(*(results if own is None else map(own.put, results)))

    def backward_inputs(self, q: Tensor, keys: Keys, rows: Rows, score: Score, total: State, dtotal: State) -> BackwardInputs:
        """Compute delta by a kernel, once for all steps of a backward. See ``Backend.backward_inputs``."""
        (out, lse, rest), (dout, dlse, _) = total, dtotal
        q, dout = align(q), align(dout.to(q.dtype))
        if self.call.fully_masked and not steps.zeroes_queries(self.call):
            unseen = (lse == -math.inf)[..., None]
            q, dout = zero_where(q, unseen), zero_where(dout, unseen)
        blank = None
        if self.call.fully_masked and score.sinks is not None:  # a query that sees no key: it, dout and dlse may hold NaN
            blank = (lse == score.sinks.float()) & ~out.any(-1)
            q, dout = (_finite(x, blank[..., None]) for x in (q, dout))
        arrays = {"out": align(out), "lse": align(lse), "dout": dout, "dlse": align(dlse)}
        if rest is not None:
            arrays["rest"] = align(rest)
        lse2, delta, *factor = launch(portable.delta(self.call, str(out.dtype).removeprefix("torch.")), arrays)
        dsinks = sink_gradient(score, total, delta.transpose(1, 2))
        if blank is not None:
            delta = _finite(delta, blank.transpose(1, 2))
        if factor:
            dout, delta = align(dout * factor[0].transpose(1, 2)[..., None]), delta.mul_(factor[0])
        bounds = None
        if score.extents is not None and self.band is None:
            arrays = self._arrays(q, keys, rows, score)
            _add_lists(arrays, (steps.extent_bounds(self.call),), shared=score.query_tiles is None)
            bounds = arrays["bounds"]
        return BackwardInputs(q, dout, lse2, delta, dsinks, bounds)

    def attend_backward(
        self, query: BackwardInputs, keys: Keys, rows: Rows, score: Score, dq: Tensor | None, arrived: Arrived, last: bool
    ) -> tuple[Tensor, Gradients]:
        """Compute a step's gradients by kernels: one for dq, dk and dv if ``in_one_pass``, which sums dq in float32, else two.
        After the ``last`` step of one pass another kernel scales and rounds dq."""
        if keys.kv.shape[1] != self.call.kv_local:
            return self._for(keys).attend_backward(query, keys, rows, score, dq, arrived, last)
        if not steps.in_one_pass(self.call):
            dq = self.attend_dq(query, keys, rows, score, dq, last)
            return dq, self.attend_dkv(query, keys, rows, score, arrived())
        arrays = self._arrays(query.q, keys, rows, score) | {"dout": query.dout, "lse2": query.lse, "delta": query.delta}
        arrays["dq_in"] = torch.zeros(hopper.sums_of_dq(self.call), device=query.q.device) if dq is None else dq
        self._add_bounds(arrays, query)
        _add_lists(arrays, steps.lists(self.call, "backward"))
        dq, *dkv = launch(hopper.backward(self.call, not self.call.packed), arrays)
        if (before := arrived()) is not None:  # added here, not in the kernel, which runs while they arrive
            dkv[0].add_(before)
        if last:
            (dq,) = launch(hopper.dq(self.call), {"sums": dq})
        return dq, dkv[0] if len(dkv) == 1 else tuple(dkv)

    def attend_dq(self, query: BackwardInputs, keys: Keys, rows: Rows, score: Score, dq: Tensor | None, last: bool) -> Tensor:
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
        _add_lists(arrays, steps.lists(call, "dq"), shared=own is None)
        (dq,) = launch(steps.dq(call, dq is None, last), arrays)
        return dq if own is None else own.put(dq)

    def attend_dkv(self, query: BackwardInputs, keys: Keys, rows: Rows, score: Score, arrived: Tensor | None) -> Gradients:
        """Return dkv, or (dk, dv) if k and v are two arrays, from this rank's queries, plus ``arrived`` from other ranks'."""
        call, own = self.call.of_own_keys, score.key_tiles
        if own is not None:
            keys, rows = along_tokens(own.take, keys), own.rows
        arrays = self._arrays(query.q, keys, rows, score) | {"dout": query.dout, "lse2": query.lse, "delta": query.delta}
        self._add_bounds(arrays, query)
        if arrived is not None:
            arrays["dkv_in"] = arrived
        _add_lists(arrays, steps.lists(call, "dkv"), shared=own is None)
        dkv = launch(steps.dkv(call, arrived is None, not call.packed), arrays)
        if own is not None:
            dkv = tuple(map(own.put, dkv))
        return dkv[0] if len(dkv) == 1 else dkv

    def _for(self, keys: Keys) -> Kernels:
        """Return this backend for shards as long as ``keys``, which differ in a balanced layout with strategy "direct"."""
        return replace(self, call=self.call.of_keys(keys.kv.shape[1]))

    def _arrays(self, q: Tensor, keys: Keys, rows: Rows, score: Score) -> dict[str, Tensor]:
        """Return the input arrays of a step's launches, by name; in a balanced layout converted to one run per shard."""
        if self.band is not None:
            rows, keys, score = as_one_run(rows, keys, score, q.shape[1], self.band)
        elif score.extents is not None:
            score = score._replace(extents=_clip(score.extents))
        return _arrays(q, keys, rows, score)

    def _add_bounds(self, arrays: dict[str, Tensor], query: BackwardInputs) -> None:
        """Add the ``bounds`` of each query tile's extents. Each step of a balanced layout computes its own, for local indices."""
        if query.bounds is not None:
            arrays["bounds"] = query.bounds
        elif "extents" in arrays:
            _add_lists(arrays, (steps.extent_bounds(self.call),))


def _of_own(score: Score) -> Score:
    """Return a score with the extents of the own queries."""
    own, extents = score.query_tiles, score.extents
    return score if own is None or extents is None else score._replace(extents=own.take(extents))


LISTED = {"rows", "extents", "bounds", "key_tiles"}
"""Names of input arrays that several calls share. If a launch reads only these inputs, its outputs are cached."""


def _finite(x: Tensor, where: Tensor) -> Tensor:
    """Return ``x`` with 0 for NaN and inf where the mask ``where`` is True."""
    return align(torch.where(where, x.nan_to_num(0, 0, 0), x))


def _add_lists(arrays: dict[str, Tensor], launches: Iterable[Launch], shared: bool = True) -> None:
    """Add the outputs of ``launches`` to ``arrays`` by name. Cache the outputs of launches that read only ``LISTED`` arrays, if
    these are ``shared`` by the layers."""
    for each in launches:
        inputs = [arrays[name] for name in each.inputs]
        if shared and LISTED.issuperset(each.inputs) and reusable(inputs, inputs[0].device):
            outputs = _recent_lists(each, tuple(map(Unchanged, inputs)), stream_of(inputs[0].device))
        else:
            outputs = launch(each, arrays)
        arrays.update(zip(each.output_names, outputs, strict=True))


@lru_cache(maxsize=64)  # an entry per launch and batch, at most 8 bytes per query and key run: all layers share it
def _recent_lists(each: Launch, inputs: tuple[Unchanged, ...], stream: int) -> tuple[Tensor, ...]:
    return launch(each, {name: x.tensor for name, x in zip(each.inputs, inputs, strict=True) if x.tensor is not None})


def _clip(extents: Tensor) -> Tensor:
    """Return the extents as int32, clipped to 0 .. ``BEYOND``, aligned to 16 bytes. Cache them if ``recent.reusable`` permits."""
    if reusable((extents,), extents.device):
        return _recently_clipped(Unchanged(extents), stream_of(extents.device))
    return align(clip(extents))


@lru_cache(maxsize=8)  # an entry per batch, 8 bytes per query
def _recently_clipped(extents: Unchanged, stream: int) -> Tensor:
    assert extents.tensor is not None
    return align(clip(extents.tensor))


def _arrays(q: Tensor, keys: Keys, rows: Rows, score: Score) -> dict[str, Tensor]:
    arrays = {"q": align(q), "rows": on_device(rows, q.device)}
    if keys.v is None:
        arrays["kv"] = align(keys.kv)
    else:
        arrays["k"], arrays["v"] = align(keys.kv), align(keys.v)
    if score.extents is not None:
        arrays["extents"] = align(score.extents)
    if keys.extents is not None:
        arrays["key_extents"] = align(keys.extents)
    if keys.bits is not None:
        arrays["key_mask"], arrays["key_mask_spans"] = launch(
            portable.unpack_key_mask(*keys.kv.shape[:2]), {"key_mask_bits": align(keys.bits)}
        )
    if score.sinks is not None:
        arrays["sinks"] = align(score.sinks.float())
    if score.alibi_slopes is not None:
        arrays["alibi_slopes"] = align(score.alibi_slopes.float())
    if score.dropout_seed is not None:
        words = (score.dropout_seed & WORD).to(torch.uint32)
        (arrays["dropout"],) = launch(portable.philox_keys(q.shape[0], q.shape[2]), {"dropout_seed": words})
    return arrays


@lru_cache(maxsize=4096)
def on_device(rows: Rows, device: torch.device) -> Tensor:
    """Copy ``rows`` to int32 [q_runs, k_runs, Row fields], cached: a copy waits for the device, and cannot be in a CUDA graph."""
    with beside_capture(device):
        return torch.tensor(rows, dtype=torch.int32, device=device)
