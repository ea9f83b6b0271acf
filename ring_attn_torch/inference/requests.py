"""What a cache's requests are, and what may be done with them between steps."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.cache import checks
from ring_attn_core.cache.ledger import Ledger
from ring_attn_core.cache.placement import held
from ring_attn_core.cache.spec import CacheSpec
from ring_attn_core.layouts import padded_local
from ring_attn_core.mistakes import as_number

from ..ring.groups import Group, group_name, group_of

Lengths = int | Sequence[int] | Tensor
Rows = int | Sequence[int]

VERSIONS = count()


@dataclass(eq=False)
class Requests:
    """The arrays of a :class:`KVCache`, and what the host knows of them."""

    k: Tensor
    v: Tensor
    positions: Tensor
    counts: Tensor
    lengths: Tensor
    reached: Tensor
    owners: Tensor
    k_scale: Tensor
    v_scale: Tensor
    spec: CacheSpec
    group: dist.ProcessGroup | DeviceMesh | None = None
    ledger: Ledger = field(init=False)
    version: int = field(init=False)
    """Another number whenever the cache has changed, and for every cache: a step of another version is not this cache's."""
    scaled: set[int] = field(init=False)
    """The layers whose scales are known: those of a step that has advanced."""

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.spec)
        self.version = next(VERSIONS)
        self.scaled = set(range(self.spec.sizes.layers)) if self.spec.scaled or not self.spec.float8 else set()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a cache of the same tokens on the same group, which cannot be copied."""
        memo[id(self.group)] = self.group
        other = copy.copy(self)
        vars(other).update({name: copy.deepcopy(x, memo) for name, x in vars(self).items()}, version=next(VERSIONS))
        return other

    @property
    def ring(self) -> Group:
        """Return the process group of the ring."""
        return group_of(group_name(self.group))

    def check_room(self, tokens: int | Sequence[int] = 1, layout: str | None = None) -> Self:
        """ValueError unless every request may have ``tokens`` more, or a chunk of so many sharded in ``layout``.

        Looks at what the host knows, the most that every request can have, and asks the device only where that is not enough.
        """
        of = list(range(self.spec.batch))
        more = [tokens] * len(of) if isinstance(as_number(tokens), int) else tokens
        more = checks.check_lengths(more, len(of), 2**30, "tokens to come")
        if layout is None:
            self.check_rows_room(more, of)
        else:
            local = padded_local(layout, self.spec.ranks, max(more))
            self.check_shards([held(layout, self.spec.ranks, local, length) for length in more], of)
        return self

    def reserve(self, tokens: int) -> Self:
        """Let the cache grow, by whole pages, until every request may have ``tokens`` more.

        The tensors are other ones then, and of another size: a CUDA graph that was captured before has to be captured again.
        Raises ValueError for a cache that was not made with ``page``.
        """
        self._ask()
        spec = checks.grown(self.spec, self.ledger.counts or [], tokens)
        if spec.slots > self.spec.slots:
            new = empty(spec, self.counts.device)
            used, known = self.spec.slots, self.spec.remembered
            new[0][:, :, :used], new[1][:, :, :used] = self.k[:, :, :used], self.v[:, :, :used]
            new[2][:, :used], new[6][:, :known] = self.positions[:, :used], self.owners[:, :known]
            self.k, self.v, self.positions, self.owners = new[0], new[1], new[2], new[6]
            self.spec = spec
            self.version = next(VERSIONS)
        return self

    def replayed(self, tokens: int | Sequence[int] = 1) -> Self:
        """Note on the host that a CUDA graph of a step of ``tokens`` tokens of every request, and of its ``advance``, ran."""
        for row, more in enumerate([tokens] * self.spec.batch if isinstance(as_number(tokens), int) else tokens):  # type: ignore[arg-type]
            self.ledger.appended([row], more)
        return self

    def rollback(self, lengths: Lengths) -> Self:
        """Let every request end after its first ``lengths`` tokens, ints or int32 [batch], the same on every rank.

        One that is not that long stays as it is. With a window a request goes back at most ``room`` tokens from the longest that
        it has been: ValueError for ints that go further; nobody looks at the values of a tensor on a GPU.
        """
        spec, device = self.spec, self.counts.device
        if isinstance(lengths, Tensor) and device.type != "cpu":
            checks.check_kept(tuple(lengths.shape), str(lengths.dtype), spec.batch)
            keep = lengths.to(device, torch.int32).clamp(min=0)
            self.ledger.uncertain()
        else:
            given = lengths.tolist() if isinstance(lengths, Tensor) else lengths
            given = [given] * spec.batch if isinstance(as_number(given), int) else given
            kept = checks.check_lengths(given, spec.batch, 2**30, "what the request keeps")
            if spec.room is not None and any(n < r - spec.room for n, r in zip(kept, self.ledger.reached, strict=True)):
                self._ask()
                for row, (length, reached) in enumerate(zip(kept, self.ledger.reached, strict=True)):
                    checks.check_back(spec, reached, length, row)
            self.ledger.cut(kept)
            keep = torch.tensor(kept, dtype=torch.int32, device=device)
        keep = torch.minimum(keep, self.lengths)
        last = self.lengths[:, None] - 1
        slot = torch.arange(spec.remembered, dtype=torch.int32, device=device)
        position = last - (last - slot) % spec.remembered  # the newest that is noted there
        removed = (position >= keep[:, None]) & (position >= 0)
        owned = self.owners[:, :-1, None] == torch.arange(spec.ranks, dtype=torch.int16, device=device)
        self.counts -= (owned & removed[..., None]).sum(1, dtype=torch.int32)
        self.positions.masked_fill_(self.positions >= keep[:, None], -1)
        self.lengths.copy_(keep)
        self.version = next(VERSIONS)
        return self

    def reset(self, rows: Rows | None = None) -> Self:
        """Empty these requests; None: all of them, and scales that were not given are taken from what is written next."""
        of = checks.check_rows("rows", list(range(self.spec.batch)) if rows is None else rows, self.spec.batch)
        for x, nothing in ((self.positions, -1), (self.counts, 0), (self.lengths, 0), (self.reached, 0)):
            x[of] = nothing
        if rows is None and self.spec.float8 and not self.spec.scaled:
            self.k_scale.zero_()
            self.v_scale.zero_()
            self.scaled.clear()
        self.ledger.reset(of)
        self.version = next(VERSIONS)
        return self

    def evict(self, rows: Rows) -> Self:
        """Empty these requests, and put 0 in place of their keys and values: nothing of them remains in memory."""
        of = checks.check_rows("rows", rows, self.spec.batch)
        for kept in (self.k, self.v):
            for layer in kept:
                layer.view(torch.uint8)[of] = 0
        return self.reset(of)

    def fork(self, source: Rows, target: Rows) -> Self:
        """Make each request of ``target`` a copy of its ``source``, or of the only one; all are read before one is written."""
        sources, targets = checks.check_fork(source, target, self.spec.batch)
        longest = max((self.ledger.lengths[row] for row in sources), default=0)
        used = self.spec.slots if self.spec.window else min(self.spec.slots, longest)
        for kept in (self.k, self.v):
            for layer in kept:
                layer = layer.view(torch.uint8)
                layer[targets, :used] = layer[sources, :used]
        for x in (self.positions, self.counts, self.lengths, self.reached, self.owners):
            x[targets] = x[sources]
        self.ledger.fork(sources, targets)
        self.version = next(VERSIONS)
        return self

    def check_rows_room(self, tokens: Sequence[int], rows: Sequence[int], valid: Tensor | None = None) -> None:
        """ValueError unless ``rows`` may have ``tokens`` more, or only those that are ``valid`` [rows, tokens].

        How many are valid in a CUDA graph that is captured now is known to whoever replays it.
        """
        if valid is not None and capturing(valid):
            return
        capacity = self.spec.capacity
        if capacity is not None and any(
            self.ledger.lengths[row] + more > capacity for more, row in zip(tokens, rows, strict=True)
        ):
            self._ask()
            if valid is not None:
                tokens = valid.sum(1).tolist()
            for more, row in zip(tokens, rows, strict=True):
                checks.check_full(self.spec, self.ledger.lengths[row], more, row)

    def check_shards(self, shares: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        if self.spec.window is not None:
            return
        if self.ledger.counts is None:
            self._ask()
        for share, row in zip(shares, rows, strict=True):
            checks.check_shards(self.spec, (self.ledger.counts or [])[row], share, row)

    def _ask(self) -> None:
        """Have the host know what the device has; nobody may ask while a CUDA graph is captured."""
        if not capturing(self.counts):
            self.ledger.know(self.counts.tolist(), self.reached.tolist())


def capturing(x: Tensor) -> bool:
    """Whether what runs now is captured in a CUDA graph, and not run."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def empty(spec: CacheSpec, device: torch.device) -> list[Tensor]:
    """k, v, positions, counts, lengths, reached, owners of no token."""
    sizes, slots = spec.sizes, spec.slots + 1
    heads = [(sizes.layers, spec.batch, slots, sizes.kv_heads, dim) for dim in (sizes.head_dim, sizes.v_dim)]
    keys = [torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=device) for shape in heads]
    shapes = (spec.batch, spec.ranks), (spec.batch,), (spec.batch,)
    counts = [torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes]
    positions = torch.full((spec.batch, slots), -1, dtype=torch.int32, device=device)
    owners = torch.zeros((spec.batch, spec.remembered + 1), dtype=torch.int16, device=device)
    return [*keys, positions, *counts, owners]
