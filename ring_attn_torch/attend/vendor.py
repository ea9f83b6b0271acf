"""The backends "flash", "flash4" and "cudnn": vendors' attention kernels; the ring merges their results in at least float32.

PyTorch ships FlashAttention-2 (arXiv:2307.08691; on a CPU its flash kernel for CPUs) and NVIDIA's cuDNN. The package flash-attn-4
ships FlashAttention-4. This module calls these kernels without a mask, or with a causal mask over equally many queries and keys.
It splits a mask ``lo <= q_pos - k_pos`` into at most three pieces, each a slice of queries and a slice of keys for one such
call. The backward kernels get the out and lse over all keys, so they return the contribution of one piece to the gradients.

Pieces are merged in at least float32. Within a piece the vendor decides the precision. On CPUs, for example, 16-bit gradients of
k and v are summed over the query heads of a group in 16 bits (2 % error with 64 query heads on one kv head).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .blockwise import Blockwise
from .keys import Keys
from .launch import align
from .score import Score
from .state import BackwardInputs, State
from .tiles import Rows


class QueryRange(NamedTuple):
    """Slices for one call of a vendor's kernel. ``causal``: the n-th query sees the first n keys; else all."""

    queries: slice
    keys: slice
    causal: bool


@dataclass(frozen=True)
class Vendor(Blockwise):
    """A vendor's backend. ``name``: "flash", "flash4" or "cudnn"."""

    name: str

    def merged(self, q: Tensor, keys: Keys, rows: Rows, score: Score, total: State) -> State:
        """Merge attention to the visible keys into ``total`` in place. ``rest`` stays: vendors return no error of lse."""
        out, lse, _ = total
        q, (k, v) = align(q), _two_arrays(keys, q.shape[-1])
        for piece in pieces(rows) if q.numel() else ():
            q_part, k_part = q[:, piece.queries], (x[:, piece.keys] for x in (k, v))
            other, other_lse = self._forward(score.scale, piece.causal, q_part, *k_part)
            before = lse[:, piece.queries]
            after = torch.logaddexp(before, other_lse.transpose(1, 2))
            weights = ((x - after).exp()[..., None] for x in (before, other_lse.transpose(1, 2)))
            out[:, piece.queries] = sum(w * x for w, x in zip(weights, (out[:, piece.queries], other), strict=True))
            lse[:, piece.queries] = after
        return total

    def gradients(self, query: BackwardInputs, keys: Keys, rows: Rows, score: Score, dq: Tensor) -> tuple[Tensor, Tensor]:
        assert query.out is not None
        q, dout, out, lse = align(query.q), align(query.dout), align(query.out), query.lse
        k, v = _two_arrays(keys, q.shape[-1])
        dkv = torch.zeros_like(keys.kv, dtype=dq.dtype)
        dk, dv = _two_arrays(Keys(dkv), q.shape[-1])
        for piece in pieces(rows) if q.numel() else ():
            q_part, k_part = (x[:, piece.queries] for x in (dout, q, out, lse)), (x[:, piece.keys] for x in (k, v))
            parts = self._backward(score.scale, piece.causal, *q_part, *k_part)
            for total, where, part in zip((dq, dk, dv), (piece.queries, piece.keys, piece.keys), parts, strict=True):
                total[:, where] += part
        return dq, dkv

    def _forward(self, scale: float, causal: bool, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return out [b n h e] and lse [b h n] of one piece."""
        if self.name == "flash4":
            out, lse, *_ = _flash4()._flash_attn_fwd(q, k, v, softmax_scale=scale, causal=causal, return_lse=True)
            return out, lse
        aten, (q, k, v) = torch.ops.aten, _heads_first(q, k, v)
        if self.name == "cudnn":
            out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, scale=scale)
            return out.transpose(1, 2), lse.reshape(out.shape[:3])
        op = (
            aten._scaled_dot_product_flash_attention_for_cpu
            if q.device.type == "cpu"
            else aten._scaled_dot_product_flash_attention
        )
        out, lse, *_ = op(q, k, v, 0.0, causal, scale=scale)
        return out.transpose(1, 2), lse

    def _backward(self, scale: float, causal: bool, *arrays: Tensor) -> tuple[Tensor, ...]:
        """Return dq, dk and dv [b n heads d] of a piece. out [b n h e], lse [b n h]: over all keys."""
        dout, q, out, lse, k, v = arrays
        sizes, lse = (q.shape[1], k.shape[1]), lse.transpose(1, 2).contiguous()
        if self.name == "flash4":
            return _flash4()._flash_attn_bwd(q, k, v, out, dout, lse, softmax_scale=scale, causal=causal)[:3]
        aten, inputs = torch.ops.aten, _heads_first(dout, q, k, v, out)
        no = torch.zeros((), dtype=torch.int64, device=q.device)
        if self.name == "cudnn":
            op = aten._scaled_dot_product_cudnn_attention_backward
            parts = op(*inputs, lse[..., None], no, no, None, None, None, *sizes, 0.0, causal, scale=scale)
        elif q.device.type == "cpu":
            op = aten._scaled_dot_product_flash_attention_for_cpu_backward
            parts = op(*inputs, lse, 0.0, causal, scale=scale)
        else:
            op = aten._scaled_dot_product_flash_attention_backward
            parts = op(*inputs, lse, None, None, *sizes, 0.0, causal, no, no, scale=scale)
        return _heads_first(*parts[:3])


def pieces(rows: Rows) -> Iterator[QueryRange]:
    """Yield at most three rectangles of each pair of runs, each fully visible or causal. The mask must have no bound ``hi``.
    Query i sees the keys j <= i - lo: so queries i < lo see no key, and all queries see the keys j < -lo."""
    for pair in chain.from_iterable(rows):
        if pair.lo > pair.hi:
            continue
        first, always = min(max(pair.lo, 0), pair.q_len), min(max(-pair.lo, 0), pair.k_len)
        square = min(pair.q_len - first, pair.k_len - always)
        q_cut, k_cut = first + square, always + square
        for q0, q1, k0, k1, causal in (
            (first, pair.q_len, 0, always, False),
            (first, q_cut, always, k_cut, True),
            (q_cut, pair.q_len, always, pair.k_len, False),
        ):
            if q0 < q1 and k0 < k1:
                yield QueryRange(slice(pair.q_base + q0, pair.q_base + q1), slice(pair.k_base + k0, pair.k_base + k1), causal)


def _two_arrays(keys: Keys, d: int) -> tuple[Tensor, ...]:
    """Return k and v. If the values are columns of k, v is k, because these backends require v_dim = head_dim = ``d``."""
    return (keys.kv, keys.kv) if keys.kv.shape[-1] == d else keys.kv.split([d, keys.kv.shape[-1] - d], -1)


def _heads_first(*arrays: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in arrays)


def _flash4() -> Any:
    return import_module("flash_attn.cute.interface")
