"""The arrays of a cache, and the operations on its requests between steps, such as rollback, reset and fork.

A slot without a token is *empty*: its position is -1, and its k and v have no effect.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.cache import checks
from ring_attn_core.cache.host_state import HostState
from ring_attn_core.cache.placement import count_held, count_removed
from ring_attn_core.cache.spec import CacheSpec
from ring_attn_core.layouts import padded_local
from ring_attn_core.validation import as_number

from ..ring.groups import Group, capturing, ring_of

Lengths = int | Sequence[int] | Tensor
Rows = int | Sequence[int]

VERSIONS = count()


@dataclass(eq=False, repr=False)
class Requests:
    """The arrays of a cache, described in :class:`KVCache`, and the operations on its requests between steps.

    ``host_state``: the lengths and counts that the host knows without reading the device.
    """

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
    states: tuple[tuple[Tensor, Tensor], ...] = ()
    host_state: HostState = field(init=False)
    version: int = field(init=False)
    """A number that changes with each ``advance``, ``replayed``, ``rollback``, ``reset``, ``evict`` and ``fork``.

    It changes also if ``reserve`` grows the cache. The cache refuses a step that was made before the last change.
    """
    scaled: set[int] = field(init=False)
    """The layers whose scales the host knows to be set: all layers, except in a float8 cache that was made without scales.

    In such a cache, ``advance`` adds the layers of a step if the host knows that the step has tokens (``DecodeStep.certain``).
    """

    def __post_init__(self) -> None:
        self.host_state = HostState(self.spec)
        self.version = next(VERSIONS)
        self.scaled = set(range(self.spec.sizes.layers)) if self.spec.scaled or not self.spec.float8 else set()

    def __repr__(self) -> str:
        return f"KVCache(lengths={self.host_state.lengths}, {self.spec})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy of the cache on the same group; a process group cannot be copied."""
        memo[id(self.group)] = self.group
        other = copy.copy(self)
        vars(other).update({name: copy.deepcopy(x, memo) for name, x in vars(self).items()}, version=next(VERSIONS))
        return other

    @property
    def ring(self) -> Group:
        return ring_of(self.group)

    def check_room(self, tokens: Lengths = 1, layout: str | None = None) -> Self:
        """Raise ValueError if a request has no room for ``tokens`` more tokens; else return the cache.

        ``tokens``: an int for all requests, or one int each. With ``layout``, the tokens are a chunk for prefill, and each rank
        must have room for its shard of the chunk. With a window the room is unlimited. The check uses upper bounds that the host
        state holds. It reads exact numbers from the device only if the bounds do not fit, or if ``layout`` is passed and the host
        does not know the number of tokens on each rank.
        """
        these = list(range(self.spec.batch))
        more = [tokens] * len(these) if isinstance(as_number(tokens), int) else tokens
        more = checks.check_lengths(more, len(these), 2**30, "tokens to come")
        if layout is None:
            self.check_rows_room(more, these)
        else:
            local = padded_local(layout, self.spec.ranks, max(more))
            self.check_shards([count_held(layout, self.spec.ranks, local, length) for length in more], these)
        return self

    def reserve(self, tokens: int) -> Self:
        """Grow the cache by whole pages until every request has room for ``tokens`` more tokens, spread evenly over the ranks.

        If the cache grows, its tensors are new and larger: capture a CUDA graph of a step again. Raise ValueError if the cache
        was not made with ``page``, or if ``tokens`` is not an int of at least 0.
        """
        self._ask()
        spec = checks.grown(self.spec, self.host_state.counts or [], tokens)
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
        """Record on the host that a CUDA graph replayed a step and its ``advance``. Return self.

        ``tokens``: new tokens of each request, one number for all or one each.
        """
        for row, more in enumerate([tokens] * self.spec.batch if isinstance(as_number(tokens), int) else tokens):  # type: ignore[arg-type]
            self.host_state.appended([row], more)
        self.version = next(VERSIONS)
        return self

    def rollback(self, lengths: Lengths) -> Self:
        """Truncate each request to its first ``lengths`` tokens.

        ``lengths``: an int for all requests, one int each, or integers [batch], equal on all ranks. A shorter request stays as it
        is. With a window a request may go back at most ``room`` tokens from its greatest length since its reset. Raise ValueError
        if a request goes back further, or if the cache has states. Going back too far is not noticed if ``lengths`` is a
        tensor and the cache is on a GPU.
        """
        spec, device = self.spec, self.counts.device
        checks.check_no_states(spec)
        if isinstance(lengths, Tensor) and device.type != "cpu":
            checks.check_kept(tuple(lengths.shape), str(lengths.dtype), spec.batch)
            keep = lengths.to(device, torch.int32).clamp(min=0)
            self.host_state.counts = None  # only the device knows how many tokens it removed
        else:
            values = lengths.tolist() if isinstance(lengths, Tensor) else lengths
            values = [values] * spec.batch if isinstance(as_number(values), int) else values
            kept = checks.check_lengths(values, spec.batch, 2**30, "what the request keeps")
            if spec.room is not None and any(n < r - spec.room for n, r in zip(kept, self.host_state.reached, strict=True)):
                self._ask()
                for row, (length, reached) in enumerate(zip(kept, self.host_state.reached, strict=True)):
                    checks.check_back(spec, reached, length, row)
            self.host_state.cut(kept)
            keep = torch.tensor(kept, dtype=torch.int32, device=device)
        keep = torch.minimum(keep, self.lengths)
        slots = torch.arange(spec.remembered, dtype=torch.int32, device=device)
        ranks = torch.arange(spec.ranks, dtype=torch.int16, device=device)
        self.counts -= count_removed(self.lengths, keep, self.owners[:, :-1], slots, ranks)
        self.positions.masked_fill_(self.positions >= keep[:, None], -1)
        self.lengths.copy_(keep)
        self.version = next(VERSIONS)
        return self

    def reset(self, rows: Rows | None = None) -> Self:
        """Empty the requests ``rows``, or all requests if ``rows`` is None.

        If ``rows`` is None, also clear float8 scales that were not passed to ``make``; the next step sets them again.
        """
        these = checks.check_rows("rows", list(range(self.spec.batch)) if rows is None else rows, self.spec.batch)
        for x, nothing in ((self.positions, -1), (self.counts, 0), (self.lengths, 0), (self.reached, 0)):
            x[these] = nothing
        for x in chain(*self.states):
            x[these] = 0
        if rows is None and self.spec.float8 and not self.spec.scaled:
            self.k_scale.zero_()
            self.v_scale.zero_()
            self.scaled.clear()
        self.host_state.reset(these)
        self.version = next(VERSIONS)
        return self

    def evict(self, rows: Rows) -> Self:
        """Empty the requests ``rows`` like :meth:`reset`, and overwrite their keys and values in this cache with 0."""
        these = checks.check_rows("rows", rows, self.spec.batch)
        for kept in (self.k, self.v):
            for layer in kept:
                layer.view(torch.uint8)[these] = 0
        return self.reset(these)

    def fork(self, source: Rows, target: Rows) -> Self:
        """Copy request ``source[i]`` to request ``target[i]`` for each i; a single source is copied to every target.

        All sources are read before a target is written. Raise ValueError if the indices do not fit.
        """
        sources, targets = checks.check_fork(source, target, self.spec.batch)
        longest = max((self.host_state.lengths[row] for row in sources), default=0)
        used = self.spec.slots if self.spec.window else min(self.spec.slots, longest)
        for kept in (self.k, self.v):
            for layer in kept:
                layer = layer.view(torch.uint8)
                layer[targets, :used] = layer[sources, :used]
        for x in (self.positions, self.counts, self.lengths, self.reached, self.owners, *chain(*self.states)):
            x[targets] = x[sources]
        self.host_state.fork(sources, targets)
        self.version = next(VERSIONS)
        return self

    def check_rows_room(self, tokens: Sequence[int], rows: Sequence[int], valid: Tensor | None = None) -> None:
        """Raise ValueError if a request in ``rows`` has no room for its number of new ``tokens``.

        With a window the room is unlimited. ``valid`` bool [rows, tokens]: only tokens marked True need room. With
        ``valid``, nothing is checked during the capture of a CUDA graph: the caller must check before each replay.
        """
        if valid is not None and capturing(valid.device.type):
            return
        capacity = self.spec.capacity
        if capacity is not None and any(
            self.host_state.lengths[row] + more > capacity for more, row in zip(tokens, rows, strict=True)
        ):
            self._ask()
            if valid is not None:
                tokens = valid.sum(1).tolist()
            for more, row in zip(tokens, rows, strict=True):
                checks.check_full(self.spec, self.host_state.lengths[row], more, row)

    def check_shards(self, shares: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        if self.spec.window is not None:
            return
        if self.host_state.counts is None:
            self._ask()
        for share, row in zip(shares, rows, strict=True):
            checks.check_shards(self.spec, (self.host_state.counts or [])[row], share, row)

    def _ask(self) -> None:
        if not capturing(self.counts.device.type):
            self.host_state.know(self.counts.tolist(), self.reached.tolist())


def empty(spec: CacheSpec, device: torch.device) -> list[Tensor]:
    sizes, slots = spec.sizes, spec.slots + 1
    heads = [(sizes.layers, spec.batch, slots, sizes.kv_heads, dim) for dim in (sizes.head_dim, sizes.v_dim)]
    keys = [torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=device) for shape in heads]
    shapes = (spec.batch, spec.ranks), (spec.batch,), (spec.batch,)
    counts = [torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes]
    positions = torch.full((spec.batch, slots), -1, dtype=torch.int32, device=device)
    owners = torch.zeros((spec.batch, spec.remembered + 1), dtype=torch.int16, device=device)
    return [*keys, positions, *counts, owners]


def empty_states(spec: CacheSpec, device: torch.device) -> tuple[tuple[Tensor, Tensor], ...]:
    zeros = lambda shape: torch.zeros((spec.batch, *shape), dtype=getattr(torch, spec.state_dtype), device=device)
    return tuple((zeros(conv), zeros(state)) for conv, state in spec.states)
