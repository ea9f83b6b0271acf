"""``flash_attn_func`` and ``flash_attn_varlen_func`` of the package flash_attn (2.8), over a ring.

FlashAttention aligns windows to the bottom right: query i sees key j if

    i + offset - left <= j <= i + offset + right        with offset = keys - queries

A ``left`` or ``right`` of -1 is unlimited, and causal=True sets ``right`` to 0. Positions i and j and the numbers of queries and
keys are counted in the global sequence, or in each packed document.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.masks import full
from ring_attn_core.model.checks import check_flags
from ring_attn_core.runs import Band
from ring_attn_core.validation import as_number, in_words, is_integer

from ..data.extents import integers, on_host
from .shards import Arguments, Qkv, RingArguments, attend, check_dims, dropout_of, shards_of

if TYPE_CHECKING:
    from jaxtyping import Float, Int


FARTHEST = 2**31
"""A window side of at least this many tokens counts as open, because no sequence is longer.

A smaller side plus a token position fits into an int64.
"""


class _FlashOptions(NamedTuple):
    """The options that ``flash_attn_func`` and ``flash_attn_varlen_func`` share, named as in the package flash_attn."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    alibi_slopes: Tensor | None
    deterministic: bool
    return_attn_probs: bool

    @property
    def sides(self) -> tuple[int | None, int | None]:
        window = self.window_size
        if not isinstance(window, tuple | list) or len(window) != 2 or not all(map(is_integer, window)):
            raise ValueError(f"window_size must be (left, right), ints in tokens, -1 for an open side, got {in_words(window)}")
        left, right = (side if 0 <= side < FARTHEST else None for side in window)
        return left, 0 if self.causal else right

    def window(self, queries: int, keys: int) -> tuple[int | None, int | None]:
        """Return ``sides``. Raise ValueError if flash_attn 2.8 computes another window on ``queries`` and ``keys`` tokens.

        Its kernels treat a right side of at least ``keys`` as open. If also ``left < keys``, they replace an open right side by
        ``keys``. So they may compute another right side than ``sides`` has. Let r be the smaller of the two right sides. The
        windows differ only for queries more than r tokens before the last query. For packed documents, ``queries`` is the number
        of queries in the longest document, and ``keys`` is max_seqlen_k, as in the kernels.
        """
        left, right = self.sides
        documented = queries if right is None else right
        computed = documented if documented < keys else keys if left is not None and left < keys else queries
        if keys and min(computed, queries - 1) != min(documented, queries - 1):
            raise ValueError(
                f"window_size={tuple(self.window_size)}: of {queries} queries and {keys} keys flash_attn computes another window "
                f"than it documents. Pass a right side below {keys}, or the mask that you mean to ring_attention"
            )
        return left, right

    def score(self, heads: int, equal_lengths: bool, dropout_seed: Any) -> Arguments:
        """Return the arguments of ``ring_attention``. ``equal_lengths``: as many keys as queries in each document."""
        check_flags(causal=as_number(self.causal), return_attn_probs=as_number(self.return_attn_probs))
        dropout = dropout_of(self.dropout_p, dropout_seed)
        if dropout and self.return_attn_probs:
            raise ValueError(
                "return_attn_probs=True with dropout asks for S_dmask, tokens times tokens, which is never made: leave it out; "
                "ring_attention(..., return_lse=True) returns the log-sum-exp"
            )
        slopes = self.alibi_slopes
        if slopes is not None:
            if not isinstance(slopes, Tensor) or slopes.ndim != 1 or slopes.shape[0] != heads:
                raise ValueError(
                    f"alibi_slopes must be a tensor [heads] = [{heads}], one slope for each head in all batch rows, got "
                    f"{in_words(slopes)}: call once for each batch row that has slopes of its own"
                )
            if self.sides[1] != 0:
                raise ValueError(
                    "alibi_slopes without causal=True penalise the distance to later keys too, |i - j|, which ring attention "
                    "does not compute: pass causal=True or a window_size with right side 0"
                )
            if not equal_lengths:
                raise ValueError(
                    "alibi_slopes need queries and keys of one length: ring attention counts distances from the same first "
                    "token for both. Leave out alibi_slopes, or pass all queries"
                )
        return {
            "scale": self.softmax_scale,
            "softcap": None if isinstance(self.softcap, float | int) and self.softcap == 0 else self.softcap,
            "alibi_slopes": slopes,
            "deterministic": self.deterministic,
            "return_lse": bool(self.return_attn_probs),
            **dropout,
        }


def flash_attn_func(
    q: Float[Tensor, "batch seq_local heads head_dim"],
    k: Float[Tensor, "batch kv_local kv_heads head_dim"],
    v: Float[Tensor, "batch kv_local kv_heads v_dim"],
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Float[Tensor, " heads"] | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    layout: str = "zigzag",
    length: int | None = None,
    kv_length: int | None = None,
    dropout_seed: int | Int[Tensor, ""] | None = None,
) -> Any:
    """Compute ``flash_attn.flash_attn_func`` over a ring, with gradients; also on a CPU and in float32 and float64.

    With ``offset = keys - queries``, counted over all ranks, query i sees key j if
    ``i + offset - left <= j <= i + offset + right``. So the last query is aligned with the last key. ``(left, right)`` is
    ``window_size``; a side of -1 is open, and ``causal`` sets right to 0. A query that sees no key has out 0.

    q, k, v: this rank's shards. ``softmax_scale``: None is ``head_dim ** -0.5``. ``softcap``: 0.0 leaves scores as they are.
    ``alibi_slopes``: float ``[heads]``, constants. ``dropout_p``: needs ``dropout_seed``, as in :func:`ring_attention`; it drops
    other probabilities than flash_attn. ``deterministic``: accepted, but gradients repeat to the bit without it too.
    ``return_attn_probs``: return (out, softmax_lse, S_dmask): the log-sum-exp of the scores, float32 [batch, heads, seq_local]
    ([heads, seq_local] of packed documents; float64 if q is), -inf if a query sees no key, and an empty
    tensor.

    ``group``, ``layout`` (a name), ``length``, ``kv_length``: as in :func:`ring_attention`.

    Raise ValueError, the same on every rank and before anything is sent, if ``return_attn_probs`` meets dropout or ring_attention
    refuses an argument. ``alibi_slopes`` are refused if they are [batch, heads], if queries and keys differ in number, or if
    neither ``causal`` nor the window sets right to 0. If queries outnumber keys, a window is refused if
    flash_attn's kernels compute another right side than its documentation says.
    """
    ring = RingArguments(group, layout, length, kv_length)
    options = _FlashOptions(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )

    def prepare() -> tuple[Qkv, Arguments]:
        check_dims({"q": q, "k": k, "v": v}, "batch", "tokens", "heads", "head_dim")
        shards = shards_of(q, k, ring)
        queries, keys = shards.lengths
        score = options.score(q.shape[2], queries == keys, dropout_seed)
        return (q, k, v), {**shards.arguments, **score, "mask": _band(options.window(queries, keys), keys - queries)}

    return _as_theirs(attend(prepare, ring))


def flash_attn_varlen_func(
    q: Float[Tensor, "seq_local heads head_dim"],
    k: Float[Tensor, "kv_local kv_heads head_dim"],
    v: Float[Tensor, "kv_local kv_heads v_dim"],
    cu_seqlens_q: Int[Tensor, " ends"],
    cu_seqlens_k: Int[Tensor, " ends"],
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Float[Tensor, " heads"] | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    layout: str = "zigzag",
    length: int | None = None,
    kv_length: int | None = None,
    dropout_seed: int | Int[Tensor, ""] | None = None,
) -> Any:
    """Compute ``flash_attn.flash_attn_varlen_func`` over a ring: documents packed into one row of tokens, with gradients.

    Document n has the queries ``cu_seqlens_q[n]`` to ``cu_seqlens_q[n + 1] - 1`` and the keys ``cu_seqlens_k[n]`` to
    ``cu_seqlens_k[n + 1] - 1``. Its masks are those of :func:`flash_attn_func`, aligned to its last query and last key.
    Tokens after the last document, padding included, have out 0 and are not seen.

    q, k, v: this rank's shards of the packed row. ``cu_seqlens_q``, ``cu_seqlens_k``: int ``[documents + 1]``, of the whole row,
    in natural order, the same on every rank. ``max_seqlen_q``, ``max_seqlen_k``: at least the longest document. The other
    arguments are those of :func:`flash_attn_func`. The ring cuts the row, not each document, so documents may have any length.

    Raise ValueError, the same on every rank and before anything is sent, if cu_seqlens decrease, end beyond the row, differ in
    number, or begin with another number than 0. Also raise it if a document is longer than max_seqlen_q or max_seqlen_k, if a
    ``block_table`` is passed, or if flash_attn_func would raise it. Under torch.compile the values of cu_seqlens are unknown, so
    only their dtypes and shapes are checked. A window is refused if flash_attn's kernels compute another one than flash_attn
    documents; under torch.compile it is accepted, and the documented window is computed.
    """
    ring = RingArguments(group, layout, length, kv_length)
    options = _FlashOptions(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )

    def prepare() -> tuple[Qkv, Arguments]:
        if block_table is not None:
            raise ValueError("block_table pages a cache, which ring attention does not read: use KVCache and decode_step")
        check_dims({"q": q, "k": k, "v": v}, "tokens", "heads", "head_dim")
        shards = shards_of(q[None], k[None], ring)
        ends_q, longest = _ends("q", cu_seqlens_q, shards.lengths[0], max_seqlen_q)
        ends_k, _ = _ends("k", cu_seqlens_k, shards.lengths[1], max_seqlen_k)
        ends = ends_q.to(q.device), ends_k.to(q.device)
        if ends[0].shape != ends[1].shape:
            raise ValueError(
                f"cu_seqlens_q and cu_seqlens_k must have one entry for each document and a 0 in front, got {ends[0].shape[0]} "
                f"and {ends[1].shape[0]} entries"
            )
        same = cu_seqlens_q is cu_seqlens_k or (not torch.compiler.is_compiling() and torch.equal(*ends))
        score = options.score(q.shape[1], same, dropout_seed)
        window = options.sides if longest is None else options.window(longest, int(max_seqlen_k))
        extents = shards.own(_extents(ends[0], ends[1], shards.lengths[0], window), 0, q.device)
        band = _band(window, 0) if same else full()  # a band tells the ring which hops it needs
        return (q[None], k[None], v[None]), {**shards.arguments, **score, "mask": band, "extents": extents}

    return _as_theirs(attend(prepare, ring), 0)


def _as_theirs(found: Any, row: Any = slice(None)) -> Any:
    """Return out, or (out, softmax_lse, S_dmask) of a call with lse, as flash_attn does. ``row``: 0 for a packed row."""
    if isinstance(found, Tensor):
        return found[row]
    out, lse = found
    return out[row], lse.transpose(1, 2)[row], out.new_empty(0)


def _band(sides: tuple[int | None, int | None], offset: int) -> Band:
    """Return the band of a window (left, right) in lags ``q_pos - k_pos``, aligned to the bottom right by ``offset``."""
    left, right = sides
    return Band(None if right is None else -right - offset, None if left is None else left - offset)


def _ends(side: str, cu_seqlens: Any, total: int, longest: Any) -> tuple[Tensor, int | None]:
    """Return checked cu_seqlens as int64, and the longest document; None if values are unknown. ``side``: "q" or "k"."""
    name = f"cu_seqlens_{side}"
    ends = integers(name, cu_seqlens, "documents + 1")
    if not ends.shape[0]:
        raise ValueError(f"{name} must be 0 and then the end of each document, got no entry")
    values = on_host(ends)
    if values is None:
        return ends, None
    steps = values[1:] - values[:-1]
    if values[0] != 0 or (steps < 0).any():
        raise ValueError(f"{name} must be 0 and then the end of each document, none before the last, got {values.tolist()[:9]}")
    if values[-1] > total:
        raise ValueError(
            f"{name} ends at {values[-1]}, and the row has {total} tokens over all ranks: pass cu_seqlens of the whole row, and "
            f"{'length' if side == 'q' else 'kv_length'}= if it is padded"
        )
    if not is_integer(longest) or (steps > int(longest)).any():
        raise ValueError(
            f"max_seqlen_{side} must be an int, at least the longest document of {name}, {max(steps, default=0)} tokens, got "
            + in_words(longest)
        )
    return ends, int(max(steps, default=0))


def _extents(ends_q: Tensor, ends_k: Tensor, length: int, sides: tuple[int | None, int | None]) -> Tensor:
    """Return extents [1, length, 2] of packed documents, with windows (None: open) aligned to each document's bottom right."""
    if ends_q.shape[0] == 1:
        return ends_q.new_zeros(1, length, 2, dtype=torch.int32)
    position = torch.arange(length, device=ends_q.device)
    at = (torch.searchsorted(ends_q, position, right=True) - 1).clamp(max=ends_q.shape[0] - 2)
    first, end = ends_k[at], ends_k[at + 1]
    aligned = end - (ends_q[at + 1] - position)  # the key that the query is aligned with
    left, right = sides
    begins = first if left is None else torch.maximum(first, aligned - left)
    stops = end if right is None else torch.minimum(end, aligned + right + 1)
    inside = (position < ends_q[-1]) & (begins < stops)
    return torch.where(inside[:, None], torch.stack([begins, stops], -1), 0)[None].int()
