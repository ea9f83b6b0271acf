"""Attention of a few queries over one rank's cache slots, and the merge of the results of several ranks or splits.

    s_ij  = softcap tanh(scale k_scale q_i . k_j / softcap) - slope lag_ij    if query i may see slot j, else -inf
    lse_i = log sum_j exp(s_ij),  out_i = v_scale sum_j exp(s_ij - lse_i) v_j

The lag ``lag_ij`` is the position of query i minus the position of slot j. A result is a packed pair: out and lse in one array
[b n h e+1]. The decode kernel divides a rank's slots into splits and returns one result for each split. The last merge adds the
sinks [h], one more logit in each softmax denominator.

Shapes     q [b n h d], k [b t g d], v [b t g e], positions int32 [b n] and [b t]: n queries, t slots, h query heads, g kv heads.
           The query heads of a kv head are rows of one matrix product
Precision  ``blockwise``: float32 throughout (float64 for float64 queries); for the kernels see the core's portable/decode.py
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ring_attn_core.kernels.decode_call import DecodeCall
from ring_attn_core.kernels.portable import launches
from ring_attn_core.problem.decode import Decode, DecodeArrays

from .launch import align, launch

CHUNK, CONVERTED = 2**20, 1024
"""The size of a chunk of slots in ``blockwise``: about CHUNK scores, but at least CONVERTED slots.

If k and v must be converted to a wider dtype, a chunk has CONVERTED slots, so that the converted values may fit into a CPU cache.
"""

LONGEST = 2048
"""The greatest number of slots of a chunk.

Products add a chunk's slots in one sum, whose error grows with its length. Over 70,001 slots the error of out is 5.6e-7; with
chunks of 4,096 slots it is 7.7e-7, and with chunks of 32,768 slots 2.1e-6. Tests allow some 8e-7.
"""


def by_kernels(arrays: DecodeArrays, call: DecodeCall) -> Tensor:
    """Run the decode kernel over this rank's slots. Return the packed (out, lse) of each split, float32 [splits b n h e+1]."""
    as_bytes = lambda x: align(x.view(torch.uint8) if call.fp8 else x)
    arguments = {
        "q": align(arrays.q),
        "k": as_bytes(arrays.k),
        "v": as_bytes(arrays.v),
        "q_positions": align(arrays.q_positions),
        "k_positions": align(arrays.k_positions),
    }
    if arrays.tree_mask is not None:
        arguments["tree_mask"] = align(arrays.tree_mask.view(torch.uint8))
        arguments["depths"] = arrays.depths
    for name in ("alibi_slopes", "k_scale", "v_scale"):
        if (x := getattr(arrays, name)) is not None:
            arguments[name] = align(x.float())
    (pairs,) = launch(launches.decode(call), arguments)
    return pairs


def merge_by_kernel(pairs: Tensor, call: DecodeCall, ranks: int | None) -> Tensor:
    """Merge packed (out, lse) pairs [pairs b n h e+1] by a kernel. ``ranks``: their number; None if each pair is one split's."""
    (pair,) = launch(launches.merge_pairs(call, ranks, False), {"pairs": pairs})
    return pair


def end_by_kernel(pairs: Tensor, sinks: Tensor | None, call: DecodeCall, ranks: int | None) -> tuple[Tensor, Tensor]:
    """Merge as ``merge_by_kernel``, with the sinks. Return out [b n h e] in q's dtype and lse [b n h] in float32."""
    arguments = {"pairs": pairs} if sinks is None else {"pairs": pairs, "sinks": align(sinks.float())}
    out, lse = launch(launches.merge_pairs(call, ranks, True), arguments)
    return out, lse


def merge(pairs: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Merge packed (out, lse) pairs [pairs b n h e+1] and the sinks. Return out [b n h e] and lse [b n h] in the pairs' dtype."""
    outs, lses = pairs[..., :-1], pairs[..., -1]
    top = lses.amax(0) if sinks is None else torch.maximum(lses.amax(0), sinks.to(lses.dtype))
    top = top.masked_fill(top == -math.inf, 0)
    weights = torch.exp(lses - top)
    total = weights.sum(0)
    if sinks is not None:
        total = total + torch.exp(sinks.to(top.dtype) - top)
    nothing = total == 0
    total = total.masked_fill(nothing, 1)
    out = (weights[..., None] * outs).sum(0) / total[..., None]
    return out, (top + total.log()).masked_fill(nothing, -math.inf)


def blockwise(arrays: DecodeArrays, problem: Decode) -> Tensor:
    """Compute attention over this rank's slots in plain torch, by batch row and chunk of slots. Return packed out and lse. The v
    of a slot that no query sees may be NaN and counts as 0; on a CPU it is replaced only if a product is not finite."""
    q, k, v = arrays.q, arrays.k, arrays.v
    (b, n, h, d), (t, g, e) = q.shape, v.shape[1:]
    wide = torch.promote_types(q.dtype, torch.float32)
    chunk = min(max(CHUNK // max(n * h, 1), CONVERTED), LONGEST) if k.dtype == wide else CONVERTED
    rows = q.to(wide).view(b, n, g, h // g, d).permute(0, 2, 1, 3, 4).reshape(b, g, -1, d) * problem.factor
    if arrays.k_scale is not None:
        rows = rows * arrays.k_scale.to(wide)[:, None, None]
    depths = None if arrays.tree_mask is None else arrays.depths
    found = []
    for row in range(b):
        state = _State.nothing(rows[row], e)
        for start in range(0, t, chunk):
            seen, lag = _visible(arrays, depths, problem.window, row, slice(start, start + chunk))
            keys, values = (x[row, start : start + chunk].to(wide) for x in (k, v))
            state = _visit(state, rows[row], keys, values, _Visibility(seen, lag, arrays.alibi_slopes, problem.softcap))
        found.append(state.pair())
    pairs = torch.stack(found) if found else rows.new_empty(0, g, n * (h // g), e + 1)
    if arrays.v_scale is not None:
        pairs[..., :-1] *= arrays.v_scale.to(wide)[:, None, None]
    return pairs.view(b, g, n, h // g, e + 1).transpose(1, 2).reshape(b, n, h, e + 1)


class _Visibility(NamedTuple):
    """The visibility mask, bool [n slots], the lags ``lag_ij``, int [n slots], the ALiBi slopes and the softcap."""

    visible: Tensor
    lag: Tensor
    alibi_slopes: Tensor | None
    softcap: float | None


class _State(NamedTuple):
    """The online-softmax state of one batch row: a row for each query and each query head of the g kv heads.
    ``top``, ``total`` [g, rows]: row max, sum of exp(s - top). ``acc`` [g, rows, e]: sum of exp(s - top) v."""

    top: Tensor
    total: Tensor
    acc: Tensor

    @staticmethod
    def nothing(rows: Tensor, e: int) -> _State:
        zeros = rows.new_zeros(rows.shape[:2])
        return _State(torch.full_like(zeros, -math.inf), zeros, zeros[..., None].expand(*zeros.shape, e))

    def pair(self) -> Tensor:
        nothing = self.total == 0
        total = self.total.masked_fill(nothing, 1)
        lse = (self.top + total.log()).masked_fill(nothing, -math.inf)
        return torch.cat([self.acc / total[..., None], lse[..., None]], -1)


def _visible(arrays: DecodeArrays, depths: Tensor | None, window: int | None, row: int, slots: slice) -> tuple[Tensor, Tensor]:
    """Return visibility, bool [n slots], and lags, int [n slots], of a batch row. ``depths``: ``arrays.depths`` of a tree."""
    position, i = arrays.k_positions[row, slots], arrays.q_positions[row, :, None]
    if depths is None:
        lag = i - position
        visible = (lag >= 0) & (position >= 0)
    else:
        n = i.shape[0]
        node = position - i[:1, 0]
        inside = (node >= 0) & (node < n) & (position >= 0)
        node = node.clamp(0, max(n - 1, 0)).long()
        lag = depths[row, :, None] - torch.where(inside, depths[row][node], position)
        visible = torch.where(inside, arrays.tree_mask[row][:, node], (position >= 0) & (position < i[:1, 0]))
    return (visible if window is None else visible & (lag <= window)), lag


def _visit(state: _State, rows: Tensor, keys: Tensor, values: Tensor, visibility: _Visibility) -> _State:
    """Merge a chunk of ``c`` slots into ``state``: ``rows`` [g, rows, d] the scaled q, ``keys`` [c g d], ``values`` [c g e]."""
    on_cpu = rows.device.type == "cpu"
    visible = visibility.visible
    if on_cpu and not visible.any():
        return state
    g, m, n = *rows.shape[:2], visible.shape[0]
    s = torch.bmm(rows, keys.permute(1, 2, 0))
    if visibility.softcap is not None:
        s = s.div_(visibility.softcap).tanh_().mul_(visibility.softcap)
    by_head = s.view(g, n, m // n, -1)
    if visibility.alibi_slopes is not None:
        by_head -= visibility.alibi_slopes.to(s.dtype).view(g, 1, m // n, 1) * visibility.lag[:, None]
    whole = on_cpu and bool(visible.all())
    if not whole:
        by_head.masked_fill_(~visible[:, None], -math.inf)
    top = torch.maximum(state.top, s.amax(-1))
    shift = top.masked_fill(top == -math.inf, 0)
    p = s.sub_(shift[..., None]).exp_()
    decay = torch.exp(state.top - shift)
    if not (on_cpu or whole):
        values = torch.where(visible.any(0)[:, None, None], values, 0)
    product = torch.bmm(p, values.transpose(0, 1))
    if on_cpu and not whole and not product.isfinite().all():
        product = torch.bmm(p, torch.where(visible.any(0)[:, None, None], values, 0).transpose(0, 1))
    return _State(top, state.total * decay + p.sum(-1), torch.addcmul(product, state.acc, decay[..., None]))
