"""Dilated attention: one ring attention per pattern (a segment length and a dilation), and a weighted average of the results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.kernels.backends import VENDORS
from ring_attn_core.keywords import named_keywords
from ring_attn_core.masks import causal, with_numbers
from ring_attn_core.problem.checks import OptionalArray
from ring_attn_core.problem.options import Options
from ring_attn_core.problem.problem import Problem
from ring_attn_core.records import remember
from ring_attn_core.runs import Band
from ring_attn_core.validation import as_number, in_words
from ring_attn_core.variants.dilated import FoldedBatches, Patterns, batches_of, places_of

from ..call.autograd import attention
from ..call.prepare import Arrays, check_tensors, problem_of, refuse_transforms
from ..ring.agreement import AgreedCall, agree_on, device_type
from ..ring.groups import constant, group_name, group_of, rank_in, ranks_of
from .folded_batches import fold_shard, mix

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


COMPILES = torch.__version__ >= "2.15"
"""True if torch.compile compiles ``dilated_attention`` correctly. 2.11 loses in-place additions of ``folded_batches.put``."""


@named_keywords
def dilated_attention(
    q: Float[Tensor, "batch seq_local heads head_dim"],
    k: Float[Tensor, "batch seq_local kv_heads head_dim"],
    v: Float[Tensor, "batch seq_local kv_heads v_dim"],
    *,
    segments: tuple[int, ...],
    dilations: tuple[int, ...],
    group: dist.ProcessGroup | DeviceMesh | None = None,
    mixing: str = "softmax",
    mask: Band = causal(),
    key_mask: Bool[Tensor, "batch seq_local"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    length: int | None = None,
    strategy: str = "auto",
    backend: str = "auto",
    deterministic: bool = False,
    return_lse: bool = False,
) -> Any:
    """Compute dilated attention of LongNet (Ding et al., arXiv:2307.02486) over a ring, forward and backward.

    Pattern i splits the sequence into segments of ``w = segments[i]`` tokens; the last segment may be shorter. In each segment,
    with ``r = dilations[i]``, head h keeps the tokens at offsets ``h % r``, ``h % r + r``, and so on. Kept tokens of a segment
    attend to each other:

        Z_i = sum_j exp(s_j),    out_i = sum_j exp(s_j) v_j / Z_i        over the keys j that pattern i lets the query see
        out = sum_i Z_i out_i / sum_i Z_i,    lse = log sum_i Z_i        over the patterns whose kept tokens include the query

    A key that a query sees in two patterns counts twice. Each pattern is one exact ring attention over the tokens that it keeps.
    Under the strategy "ring", keys travel no farther than a segment reaches.

    Arguments (arrays are this rank's shards in contiguous layout: rank R holds tokens R s to (R + 1) s - 1):
        q: ``[batch, s, heads, head_dim]``; k: ``[batch, s, kv_heads, head_dim]``; v: ``[batch, s, kv_heads, v_dim]``; dtypes and
            heads as in ``ring_attention``.
        segments: lengths in tokens, strictly increasing. They need not divide the sequence, and may be longer than it.
        dilations: one for each segment; it divides the segment's length.
        group: the ring: a ProcessGroup or a 1-D DeviceMesh; None is the default group, or a ring of one.
        mixing: "softmax": every head uses all patterns, as above. "heads": of the n patterns, head h uses only pattern
            ``h n // heads``.
        mask: ``causal()``, ``full()`` or ``sliding_window(before, after)`` in global positions; it applies inside each segment.
        key_mask: bool ``[batch, s]``, True where a key may be attended.
        scale, softcap, strategy, backend, deterministic: as in ``ring_attention``. The backends "flash", "cudnn" and "flash4" are
            refused, because they give no gradient of lse, and the weights of the patterns need this gradient.
        length: global number of tokens without padding. Padding keys are masked; padding queries have out 0. None: no padding.
        return_lse: also return lse.

    Returns ``out [batch, s, heads, v_dim]`` in q's dtype, and with ``return_lse`` also ``lse [batch, s, heads]`` in at least
    float32, natural log, differentiable. A query that no pattern keeps, or that sees no key, has out 0, lse -inf, gradient 0.
    torch.compile(fullgraph=True) works from PyTorch 2.15 on; older versions raise NotImplementedError under it.

    Raise ValueError if segments and dilations differ in number, if segments do not increase, or if a dilation does not divide its
    segment. Raise it too if mixing is "heads" and there are more patterns than heads, if q and k differ in length, or if
    ``ring_attention`` would refuse an argument. Raise it also if arguments differ between ranks. Ranks compare arguments only at
    their first call with them, and never under torch.compile. The error is the same on every rank, and raised before any sending.
    """
    if torch.compiler.is_compiling() and not COMPILES:
        raise NotImplementedError(
            "PyTorch before 2.15 compiles dilated_attention to something else: leave it out of what is compiled, with "
            "torch.compiler.disable, or take a newer PyTorch"
        )
    name = group_name(group)
    _, ranks = _place(name)
    arrays = Arrays(key_mask=key_mask)
    made: list[tuple[Options, tuple[FoldedBatches, ...]]] = []
    shared: dict[str, Any] = {"mask": mask, "length": length, "scale": scale, "softcap": softcap}
    shared |= {"strategy": strategy, "backend": backend, "deterministic": deterministic}

    def check() -> None:
        options = Options(layout="contiguous", **shared)
        refuse_transforms((q, k, v))
        check_tensors(q, k, v, arrays, name)
        if backend in VENDORS:
            raise ValueError(
                f'the lse of backend={backend!r} has no gradient, which the weights of patterns need: use backend="auto"'
            )
        make = _problem if torch.compiler.is_compiling() else problem_of
        known = batches_of if torch.compiler.is_compiling() else _known_batches
        made.append((options, known(make(q, k, v, arrays, ranks, options), Patterns(segments, dilations, mixing))))

    if torch.compiler.is_compiling():
        check()
    else:
        compared = {"segments": segments, "dilations": dilations, "mixing": mixing} | shared
        alike = [(label, _in_words(x)) for label, x in compared.items()]
        shapes = [(f"{label}_shape", _kind(x)) for label, x in (("q", q), ("k", k), ("v", v), ("key_mask", key_mask))]
        agree_on(AgreedCall("dilated_attention", device_type(q), (*shapes, *alike)), group_of(name), check)
    ((options, batches),) = made
    out, lse = attend(q, k, v, key_mask, batches, options, name)
    return (out, lse) if return_lse else out


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    batches: tuple[FoldedBatches, ...],
    options: Options,
    group_name: str,
) -> tuple[Tensor, Tensor]:
    rank, _ = _place(group_name)
    queries, keys = places_of(batches)
    outs, lses = [], []
    batched = fold_shard(q, queries, rank), fold_shard(k, keys, rank), fold_shard(v, keys, rank)
    for each, q_of, k_of, v_of in zip(batches, *batched, strict=True):
        out, lse = attention(q_of, k_of, v_of, _arrays(each, key_mask, q, rank), None, each.options(options), group_name)
        outs.append(out)
        lses.append(lse)
    return mix(outs, lses, queries, rank)


def _arrays(batches: FoldedBatches, key_mask: Tensor | None, q: Tensor, rank: int) -> Arrays:
    """Return a pattern's extents [b * head_groups, slots, 2] and key mask [b * head_groups, slots], each None if not needed."""
    if not batches.needs_extents and key_mask is None:
        return Arrays()
    b, rows = q.shape[0], q.shape[0] * batches.head_groups
    slot = torch.arange(batches.slots, device=q.device, dtype=torch.int32)
    group = torch.arange(batches.head_groups, device=q.device, dtype=torch.int32)[:, None]
    holds, first, end = batches.visible(rank, slot, group)
    extents = torch.stack((first, end), -1).expand(b, -1, -1, -1).reshape(rows, batches.slots, 2)
    folded_mask = None
    if key_mask is not None:
        front = batches.front(rank)
        padded = torch.nn.functional.pad(key_mask, (front, batches.spanned - front - batches.local))
        batch_mask = padded.unflatten(1, (batches.slots, batches.dilation))[:, :, : batches.head_groups].transpose(1, 2)
        folded_mask = (batch_mask & holds).reshape(rows, batches.slots)
    elif batches.needs_key_mask:
        folded_mask = holds.expand(b, -1, -1).reshape(rows, batches.slots)
    return Arrays(extents=extents if batches.needs_extents else None, key_mask=folded_mask)


_known_batches = remember(batches_of)


def _problem(q: Tensor, k: Tensor, v: Tensor, arrays: Arrays, ranks: int, options: Options) -> Problem:
    """Describe a call as a Problem, like ``problem_of`` but without its cache, because torch.compile warns about caches."""
    passed = {"q": q, "k": k, "v": v} | {name: x for name, x in arrays._asdict().items() if x is not None}
    described = [OptionalArray(name, tuple(x.shape), str(x.dtype).removeprefix("torch.")) for name, x in passed.items()]
    q_, k_, v_, *optional = described
    dtypes = q_.dtype, k_.dtype, v_.dtype
    return Problem(q_.shape, k_.shape, v_.shape, dtypes, q.device.type, ranks, options, tuple(optional), framework="torch")


@constant
def _place(group_name: str) -> tuple[int, int]:
    group = group_of(group_name)
    return rank_in(group), ranks_of(group)


def _in_words(x: Any) -> str:
    """Return an argument as text for comparison between ranks. A Python 4 and a NumPy 4 give the same text."""
    if isinstance(x, tuple | list):
        return f"{[as_number(each) for each in x]}"
    return str(with_numbers(x)) if isinstance(x, Band) else in_words(as_number(x))


def _kind(x: Any) -> str:
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}" if isinstance(x, Tensor) else in_words(x)
