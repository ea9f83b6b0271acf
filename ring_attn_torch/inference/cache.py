"""A KV cache that prefill and decode steps fill. ``cache/placement.py`` of the core decides which rank stores each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ring_attn_core.cache import checks
from ring_attn_core.cache.placement import count_held
from ring_attn_core.cache.spec import CacheSpec
from ring_attn_core.validation import is_integer

from ..call.prepare import dtype_name
from ..ring.agreement import AgreedCall, agree_on, same_error
from ..ring.groups import capturing, rank_in, ranks_of, ring_of
from .merge import refuse_gradients
from .requests import VERSIONS, Lengths, Requests, Rows, empty, empty_states
from .scales import make_scales, of_first, quantize
from .step import CachedRequests, DecodeStep, append_chunk, append_tokens, known_rows


class LayerPart(NamedTuple):
    """One layer's k, v and token positions on this rank, as arguments of ``tree_attention_decode``.
    k, v: [batch, slots, kv_heads, dim]. ``k_positions``: int32 [batch, slots], -1: empty slot. Scales of float8: [kv_heads]."""

    k: Tensor
    v: Tensor
    k_positions: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None


@dataclass(eq=False, repr=False)
class KVCache(Requests):
    """The keys and values of a batch of requests for every layer, sharded over the ranks of a ring; see ``docs/cache.md``.

    Create one with :meth:`make`. A slot holds one token. Arrays of this rank's slots: k [layers, batch, slots, kv_heads,
    head_dim], v [..., v_dim] and positions int32 [batch, slots], the position of the token in each slot, -1 if empty. Arrays that
    are equal on every rank:
        counts: int32 [batch, ranks], the number of a request's tokens that each rank has stored, overwritten tokens included.
        lengths: int32 [batch], the number of tokens of each request.
        reached: int32 [batch], a request's greatest length since its reset, including appended steps that were never advanced.
        owners: int16 [batch, n + 1], ranks of the newest n = ``spec.remembered`` tokens; the token at position p has index p % n.
        k_scale, v_scale: float32 [layers, kv_heads], the scales of a float8 cache; 0 until they are known.
        states: of each recurrent layer the last tokens before its convolution [batch, taps - 1, channels], and its state.
    The last slot only absorbs tokens that this rank does not cache. The last index of ``owners`` only absorbs padding.

    A step of new tokens is

        step = cache.step(tokens)                       # or cache.prefill_step(...)
        for layer in range(layers):                     # q, k, v of the new tokens, at step.positions
            cache = cache.append(layer, k, v, step)     # or out, cache = prefill(q, k, v, cache, layer, step)
            ...                                         # attention over cache.part(layer, step)
        cache = cache.advance(step)

    The tokens that ``append`` writes become visible with ``advance``. If a step is not advanced, later steps do not see its
    tokens. Other methods take effect at once. ``append`` and ``advance`` change tensors in place, at fixed shapes and without
    waiting for the device, so that a step of ``cache.step`` may be captured in a CUDA graph. Methods that change the cache return
    the cache. So the same program runs in JAX, where they return a new cache.
    """

    @classmethod
    def make(
        cls,
        config: Any,
        batch: int,
        capacity: int | None = None,
        *,
        dtype: torch.dtype | str | None = None,
        window: int | None = None,
        room: int | None = None,
        page: int | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        device: torch.device | str | None = None,
    ) -> KVCache:
        """Create an empty cache for ``batch`` requests, each with at most ``capacity`` tokens on all ranks together.

        ``config``: a TransformerConfig, or ``CacheSizes(layers, kv_heads, head_dim, v_dim)``. ``dtype``: "bfloat16", "float16",
        "float32", "float64" or "float8_e4m3fn"; None for the compute dtype of a TransformerConfig, and bfloat16 for CacheSizes.
        A float8 cache divides each value by the scale of its layer and kv head, and clamps it to the largest float8 number.
        ``k_scale``, ``v_scale``: these scales, float32 [layers, kv_heads]; by default each is the smallest power of two
        above max |x| / 448, with the maximum over the tokens of the first completed step (1 if the maximum is 0).

        Without a window, ``capacity`` is rounded up until all ranks have equally many slots: an even number if there are several
        ranks, and whole pages if ``page`` is set. So a prompt of ``capacity`` tokens fits in every layout.

        ``window``: the number of positions before its own that a query sees. With a window a request may have any length.
        ``capacity`` is then the number of newest tokens of a request that each rank keeps: at least ``window + room``, which
        is the default. ``room`` (by default ``window``): the maximum number of tokens that a rollback removes or a step adds; a
        prefill of empty requests may add more. ``page`` (not with a window): the number of slots per rank by which
        :meth:`reserve` grows the cache. ``group``: the ring.

        Raise ValueError, the same on every rank, if arguments do not fit or differ between ranks. Ranks compare them at the first
        call with these arguments, and at every call that passes scales.
        """
        ring = ring_of(group)
        with same_error(ring):
            where = torch.empty(0, device=device).device
            scaled = k_scale is not None or v_scale is not None
            options: dict[str, Any] = {"window": window, "room": room, "page": page, "scaled": scaled}
            spec = CacheSpec.of(
                config, batch, capacity, ranks_of(ring), dtype=None if dtype is None else dtype_name(dtype), **options
            )
            scales = make_scales(spec, k_scale, v_scale, where)
        values = [tuple(map(tuple, x.tolist())) if scaled else None for x in scales]
        alike = *spec.fingerprint(), ("k_scale", values[0]), ("v_scale", values[1])
        agree_on(AgreedCall("KVCache.make", where.type, alike, each_time=scaled), ring, lambda: None)
        return cls(*empty(spec, where), *scales, spec=spec, group=group, states=empty_states(spec, where))

    def step(self, tokens: int = 1, *, valid: Tensor | None = None, rows: Rows | None = None) -> DecodeStep:
        """Return a DecodeStep with the positions and slots of ``tokens`` new tokens of each request.

        Every rank computes q, k and v of all these tokens; each token is cached on one rank. ``valid`` bool [requests, tokens],
        the same on every rank: True for real tokens; None: all. ``rows``: the requests' indices, one int or several; None: all.
        Raise ValueError if the tokens do not fit. The number of ``valid`` tokens is on the device, so the host first assumes that
        all are real, and reads the number only if not all would fit.
        """
        these = self._requests(rows)

        def check() -> None:
            checks.check_tokens(self.spec, tokens)
            if valid is not None:
                checks.check_valid(*_kind(valid), (len(these), tokens))
            self.check_rows_room([tokens] * len(these), these, valid)

        arguments = ("tokens", tokens), ("requests", tuple(these)), ("valid", valid is not None)
        agree_on(AgreedCall("KVCache.step", self.counts.device.type, arguments), self.ring, check)
        which = self._rows(these, rows is None)
        held = self._held(which["rows"])
        record: dict[str, Any] = {"tokens": tokens, "layout": None, "length": tokens, "fresh": False, "certain": valid is None}
        record |= append_tokens(held, tokens, valid) | which
        return DecodeStep(**record, before=held.lengths, version=self.version, host=(tuple(these), None))

    def prefill_step(
        self,
        tokens: int,
        layout: str = "zigzag",
        lengths: Lengths | None = None,
        *,
        rows: Rows | None = None,
        fresh: bool = False,
    ) -> DecodeStep:
        """Return a DecodeStep that adds one chunk, sharded in ``layout``, to each request. A shard has ``tokens`` tokens.

        A chunk continues the cached tokens of its request. ``lengths``: the number of tokens in each chunk without the padding at
        its end: an int for all, or one int each, known to the host. None: no padding. ``rows``: the requests; None: all.
        ``fresh``: if True, check that these requests are empty. This has no other effect: unlike in JAX, the host knows which
        requests are empty.

        Raise ValueError, the same on every rank, if the chunk does not fit, if ranks disagree on lengths, or if ``fresh`` is True
        and a request has tokens.
        """
        spec = self.spec
        these = self._requests(rows)
        host_lengths: Any = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        host_lengths = tuple(host_lengths) if isinstance(host_lengths, Sequence) else host_lengths
        chunk: list[int] = []
        counts_of_ranks: list[list[int]] = []

        def check() -> None:
            counts = tokens * spec.ranks if host_lengths is None else host_lengths
            counts = [counts] * len(these) if is_integer(counts) else counts
            chunk.extend(checks.check_lengths(counts, len(these), tokens * spec.ranks, "what the shards hold"))
            counts_of_ranks.extend(count_held(layout, spec.ranks, tokens, length) for length in chunk)
            if fresh and any(self.host_state.lengths[row] for row in these):
                raise ValueError("fresh=True, and some request of the step has tokens: reset it, or leave fresh out")
            if any(self.host_state.lengths[row] for row in these):
                checks.check_tokens(spec, max(1, *chunk))
            self.check_shards(counts_of_ranks, these)

        known = tuple(self.host_state.lengths[row] for row in these)
        arguments = ("tokens", tokens), ("layout", layout), ("lengths", host_lengths)
        arguments = *arguments, ("requests", tuple(these)), ("cached lengths", known)
        device = self.counts.device
        agree_on(AgreedCall("KVCache.prefill_step", device.type, arguments, each_time=True), self.ring, check)
        which = self._rows(these, rows is None)
        cached = self._held(which["rows"])
        record: dict[str, Any] = {"tokens": tokens, "layout": layout, "length": max(chunk), "certain": any(chunk)} | which
        record |= append_chunk(cached, torch.tensor(chunk, dtype=torch.int32, device=device), layout, tokens)
        host = tuple(these), tuple(map(tuple, counts_of_ranks))
        return DecodeStep(**record, fresh=not any(known), before=cached.lengths, version=self.version, host=host)

    def append(self, layer: int, k: Tensor, v: Tensor, step: DecodeStep) -> KVCache:
        """Write k [requests, tokens, kv_heads, head_dim] and v of a layer's new tokens; each rank writes the tokens it caches.

        Raise ValueError if shapes or dtypes do not fit, if k or v requires a gradient, if the step is of another cache, or if the
        cache has changed since the step was made. At the first call with a given layer, shapes and dtypes, all ranks raise the
        same error. In later calls a rank with an error raises alone.
        """
        (k_shape, k_dtype), (v_shape, v_dtype) = _kind(k), _kind(v)
        shapes, dtypes = (k_shape, v_shape), (k_dtype, v_dtype)

        def check() -> None:
            self.check_step(layer, step)
            checks.check_new(self.spec, (len(step.chunk), step.tokens), shapes, dtypes)
            refuse_gradients("KVCache.append", (k, v))

        arguments = ("layer", layer), ("shapes of k and v", shapes), ("dtypes", dtypes)
        agree_on(AgreedCall("KVCache.append", self.counts.device.type, arguments), self.ring, check)
        if layer not in self.scaled or (self.host_state.empty and self.spec.float8 and not self.spec.scaled):
            nothing = (self.lengths == 0).all()
            of_first(self.k_scale[layer], self.v_scale[layer], nothing, (k, v), step, self.ring)
        if not step.written:
            self.reached[step.into[:, 0]] = torch.maximum(self.reached[step.into[:, 0]], step.lengths)
            rows, counts_of_ranks = step.host
            self.host_state.written(
                rows, [step.tokens] * len(rows) if counts_of_ranks is None else list(map(sum, counts_of_ranks))
            )
        for kept, new, scale in ((self.k, k, self.k_scale), (self.v, v, self.v_scale)):
            new = new if step.source is None else new[step.in_step, step.source]
            if self.spec.float8:  # as bytes: some devices have no index_put of float8
                new, kept = quantize(new, scale[layer]).view(torch.uint8), kept.view(torch.uint8)
            kept[layer].index_put_((step.into, step.slots), new)
        step.written.add(layer)
        return self

    def advance(self, step: DecodeStep) -> KVCache:
        """Make the new tokens of a step visible in the cache, after ``append`` to every layer.

        Raise ValueError if a layer has not been written, or if the cache has changed since the step was made.
        """
        missing = [layer for layer in range(self.spec.sizes.layers) if layer not in step.written]
        if missing:
            raise ValueError(f"layers {missing} have not been written in this step: append to every layer, then advance")
        self.check_step(0, step)
        if step.rows is None:
            self.positions.copy_(step.k_positions)
            self.counts.copy_(step.counts)
            self.lengths.copy_(step.lengths)
            self.owners.scatter_(1, step.owner_slots, step.owners)
        else:
            self.positions[step.rows] = step.k_positions
            self.counts[step.rows] = step.counts
            self.lengths[step.rows] = step.lengths
            self.owners[step.into, step.owner_slots] = step.owners
        self.version = next(VERSIONS)
        if step.certain:
            self.scaled |= step.written
        if not capturing(self.counts.device.type):
            rows, counts_of_ranks = step.host
            if counts_of_ranks is None:
                self.host_state.appended(rows, step.tokens)
            else:
                self.host_state.prefilled(rows, counts_of_ranks)
        return self

    def part(self, layer: int, step: DecodeStep | None = None) -> LayerPart:
        """Return this rank's LayerPart for all requests or, with ``step``, for the step's requests with their new tokens."""
        rows = None if step is None else step.rows
        k, v = (x[layer] if rows is None else x[layer][rows] for x in (self.k, self.v))
        scales = (self.k_scale[layer], self.v_scale[layer]) if self.spec.float8 else (None, None)
        return LayerPart(k, v, self.positions if step is None else step.k_positions, *scales)

    def _requests(self, rows: Rows | None) -> list[int]:
        with same_error(self.ring):
            return checks.check_step_rows(list(range(self.spec.batch)) if rows is None else rows, self.spec.batch)

    def _rows(self, rows: list[int], every: bool) -> dict[str, Any]:
        """Return a step's ``rows``, ``into``, ``in_step`` for requests ``rows``. ``every``: True if ``rows`` are all requests."""
        into, in_step = (known_rows(tuple(x), self.counts.device) for x in (rows, range(len(rows))))
        return {"rows": None if every else into, "into": into[:, None], "in_step": in_step[:, None]}

    def _held(self, rows: Tensor | None) -> CachedRequests:
        at = lambda x: x if rows is None else x[rows]
        return CachedRequests(at(self.positions), at(self.counts), at(self.lengths), self.spec, rank_in(self.ring))

    def check_step(self, layer: int, step: DecodeStep) -> None:
        checks.check_layer(self.spec, layer)
        if step.version != self.version:
            raise ValueError(
                "this step was made before the cache has changed, or of another cache: make it of this one, after the last "
                "advance, rollback or reset"
            )


def _kind(x: Any) -> tuple[tuple[int, ...], str]:
    """Return the shape and the dtype's name of a tensor. For any other object return () and its type's name."""
    return (tuple(x.shape), dtype_name(x.dtype)) if isinstance(x, Tensor) else ((), type(x).__name__)
