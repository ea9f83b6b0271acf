"""Sharding of global batches over a ring, and gathering of global logits.

Each rank passes its own batch rows, any number of rows. Each rank computes a shard of the tokens of all ranks' rows. Then each
rank receives the global logits of the rows that it passed. If all ranks pass the same rows, they are computed once.

    input               rank 0: a b    rank 1: c            rows a to c, tokens 0 to 7
    inside the ring     rank 0: tokens 0 1 6 7 of a b c     rank 1: tokens 2 3 4 5 of a b c
    output              rank 0: a b    rank 1: c            all tokens
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..data.layout import from_layout, to_layout
from ..ring.agreement import exchange, same_error
from ..ring.groups import Group, group_of, rank_in, ranks_of, ring_of
from .ring import LayerRing


class ShardedRows(NamedTuple):
    """The sharding of the ranks' global sequences: the layout, the ring, tokens per batch row, and rows per rank."""

    layout: str
    ring: Group
    length: int
    brought: tuple[int, ...]
    """Number of rows passed by each rank."""
    same: bool
    """True if all ranks pass the same rows and masks."""
    masked: bool
    """True if any rank passes a mask."""

    @classmethod
    def of(cls, ids: Tensor, mask: Tensor | None, where: LayerRing) -> ShardedRows:
        """All-gather the shapes and digests of the ranks' inputs, and return the ShardedRows of this rank's rows ``ids``."""
        layout, ring = where.layout, ring_of(where.group)
        with same_error(ring):
            check_global(ids, mask)
        if ring is None or ranks_of(ring) == 1:
            return cls(layout, ring, ids.shape[1], (ids.shape[0],), True, mask is not None)
        gathered = exchange("RingTransformer(auto_shard=True)", [*ids.shape, mask is not None, _content(ids, mask)], ring)
        brought, lengths, masks, contents = zip(*gathered, strict=True)
        if len(set(lengths)) > 1:
            raise ValueError(
                f"the ranks bring sequences of {', '.join(map(str, lengths))} tokens: pad them to the same number, and pass a "
                "mask that is False where a token is padding"
            )
        return cls(layout, ring, lengths[0], brought, len(set(contents)) == 1, any(masks))

    def shard(self, x: Tensor) -> Tensor:
        """Return this rank's shard, int64 [rows, tokens], of all ranks' rows. ``x``: integers [rows of this rank, length]."""
        ranks, rank = ranks_of(self.ring), rank_in(self.ring)
        parts = to_layout(x.long(), self.layout, ranks).chunk(ranks, 1)
        if self.same:
            return parts[rank]
        return _exchange(torch.cat(parts), [len(x)] * ranks, list(self.brought), self.ring)

    def shard_mask(self, mask: Tensor | None, ids: Tensor) -> Tensor | None:
        """Return this rank's shard, bool [rows, tokens], of all ranks' masks (None: all True), or None if no rank passes one."""
        if not self.masked:
            return None
        mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        return self.shard(mask).bool()

    def unshard(self, x: Tensor) -> Tensor:
        """Undo ``shard`` by an all-to-all: [rows, tokens, features] to [rows of this rank, length, features]. Differentiable
        once. If all ranks passed the same rows, each rank gathers all, and the backward sums the gradients of all ranks."""
        ranks, mine = ranks_of(self.ring), self.brought[rank_in(self.ring)]
        if ranks > 1:
            counts = [len(x)] * ranks if self.same else list(self.brought)
            x = x.repeat(ranks, 1, 1) if self.same else x
            parts = _Exchange.apply(x, counts, [mine] * ranks, self.ring)
            x = parts.unflatten(0, (ranks, mine)).transpose(0, 1).flatten(1, 2)
        return from_layout(x, self.layout, ranks, self.length)


class _Exchange(torch.autograd.Function):
    """The autograd Function of ``_exchange``. Its backward sends each row's gradient back to the rank that sent the row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], ring: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.ring = sent, received, ring.group_name  # a stored group would live as long as the graph
        return _exchange(x, sent, received, ring)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _exchange(dout, ctx.received, ctx.sent, group_of(ctx.ring)), None, None, None


def _exchange(x: Tensor, sent: list[int], received: list[int], ring: Group) -> Tensor:
    """Send ``sent[r]`` rows of ``x`` to each rank r, in order. Return the ``received[r]`` rows from each rank, concatenated."""
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=ring)
    return out


def check_global(ids: Any, mask: Any) -> None:
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        got = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"ids must be integers [batch, tokens], whole sequences in natural order, got {got}")
    if mask is not None and (not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != ids.shape):
        got = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"mask must be bool {list(ids.shape)}, True for tokens and False for padding, got {got}")


def _content(ids: Tensor, mask: Tensor | None) -> str:
    arrays = [ids.long(), *([] if mask is None else [mask])]
    return blake2b(b"".join(x.cpu().numpy().tobytes() for x in arrays), digest_size=16).hexdigest()
