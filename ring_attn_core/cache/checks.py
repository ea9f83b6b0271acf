"""Checks of the arguments of a KVCache's methods and of the cache that a model gets, and the spec of a grown cache."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..validation import in_words, is_integer, is_traced
from .spec import DTYPES, FP8, CacheSizes, CacheSpec


def check_tokens(spec: CacheSpec, tokens: Any) -> None:
    if not is_integer(tokens) or tokens < 1:
        raise ValueError(f"tokens must be an int of at least 1, how many new ones a request has, got {in_words(tokens)}")
    if spec.room is not None and tokens > spec.room:
        raise ValueError(
            f"a step of {tokens} tokens, and this cache has room for {spec.room} beyond its window of {spec.window}, while some "
            f"request holds tokens: take smaller steps, or make the cache with room={tokens}"
        )


def check_full(spec: CacheSpec, length: int, tokens: int, row: int) -> None:
    if spec.capacity is not None and length + tokens > spec.capacity:
        more = "reserve more" if spec.page is not None else "make the cache with a larger capacity, or with page= to let it grow"
        raise ValueError(
            f"the cache is full: request {row} has {length} tokens, and {tokens} more exceed the capacity of {spec.capacity} "
            f"({spec.slots} on each of {spec.ranks} ranks): {more}, or reset it"
        )


def check_shards(spec: CacheSpec, counts: Sequence[int], held: Sequence[int], row: int) -> None:
    """Raise ValueError if a rank has too few empty slots for a request's new tokens; with a window slots are reused.
    ``counts``, ``held``: numbers of the request's cached and new tokens on each rank."""
    needed = max(count + more for count, more in zip(counts, held, strict=True))
    larger = f"reserve({(needed - max(counts)) * spec.ranks})" if spec.page else f"make it with capacity={needed * spec.ranks}"
    for rank, (count, more) in enumerate(zip(counts, held, strict=True)):
        if spec.window is None and count + more > spec.slots:
            raise ValueError(
                f"the cache is full: rank {rank} has {count} of its {spec.slots} slots of request {row} in use, and holds {more} "
                f"tokens of this chunk: {larger}, or choose a layout that shares the tokens evenly, such as striped"
            )


def check_lengths(lengths: Any, batch: int, most: int, what: str) -> list[int]:
    """Return ``lengths`` as ints in 0 .. ``most``. ``what``: the last words of the message, which explain ``most``."""
    lengths = lengths.tolist() if getattr(lengths, "ndim", 0) == 1 and not is_traced(lengths) else lengths
    values = list(lengths) if isinstance(lengths, Sequence) else [lengths]
    if len(values) != batch or not all(is_integer(x) for x in values):
        raise ValueError(f"lengths must be {batch} ints, one for every request, got {in_words(lengths)}: {lengths!r}")
    for row, length in enumerate(map(int, values)):
        if not 0 <= length <= most:
            raise ValueError(f"lengths[{row}]={length}: it must be 0 to {most}, {what}")
    return [int(x) for x in values]


def check_rows(name: str, rows: Any, batch: int) -> list[int]:
    values = list(rows) if isinstance(rows, Sequence) else [rows]
    if not all(is_integer(row) and 0 <= row < batch for row in values):
        raise ValueError(f"{name} must be an int or ints from 0 to {batch - 1}, the cache's requests, got {rows!r}")
    if len(set(map(int, values))) != len(values):
        raise ValueError(f"{name} names a request twice: {rows!r}")
    return [int(row) for row in values]


def check_fork(source: Any, target: Any, batch: int) -> tuple[list[int], list[int]]:
    values = list(source) if isinstance(source, Sequence) else [source]
    for row in values:
        check_rows("source", (row,), batch)
    targets = check_rows("target", target, batch)
    sources = [int(row) for row in values] * (len(targets) if len(values) == 1 else 1)
    if len(sources) != len(targets):
        raise ValueError(f"fork copies one request to some, or as many as there are targets, got {source!r} to {target!r}")
    return sources, targets


def check_step_rows(rows: Any, batch: int) -> list[int]:
    values = check_rows("rows", rows, batch)
    if not values:
        raise ValueError("rows names no request, and a step is of one at least: pass ints, or None for all of them")
    return values


def check_layer(spec: CacheSpec, layer: Any) -> None:
    """Raise ValueError if ``layer`` is not a layer of the cache. A traced layer is not checked."""
    try:
        known = operator.index(layer) if is_integer(layer) else -1
    except TypeError:
        return
    if not 0 <= known < spec.sizes.layers:
        raise ValueError(f"layer={layer} is not one of the cache's {spec.sizes.layers} layers, 0 to {spec.sizes.layers - 1}")


def check_new(spec: CacheSpec, tokens: tuple[int, int], shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]) -> None:
    """Raise ValueError if the shapes or dtypes of new k and v do not fit the cache, or if the two dtypes differ.
    ``tokens``: (requests, new tokens of each). A float8 cache takes any of ``DTYPES`` except float8."""
    sizes = spec.sizes
    for name, shape, dim in (("k", shapes[0], sizes.head_dim), ("v", shapes[1], sizes.v_dim)):
        expected = (*tokens, sizes.kv_heads, dim)
        if tuple(shape) != expected:
            raise ValueError(
                f"{name} must be [requests, tokens, kv_heads, dim] = {list(expected)}, as this step and cache have them, "
                f"got {list(shape)}"
            )
    if dtypes[0] != dtypes[1]:
        raise ValueError(f"k and v must have one dtype, got {dtypes[0]} and {dtypes[1]}: cast them to the same")
    taken = [dtype for dtype in DTYPES if dtype != FP8] if spec.dtype == FP8 else [spec.dtype]
    if dtypes[0] not in taken:
        expected = ", ".join(taken)
        raise ValueError(
            f"k and v are {dtypes[0]}, and a cache of {spec.dtype} takes {expected}: cast them, or make it in theirs"
        )


def check_valid(shape: tuple[int, ...], dtype: str, expected: tuple[int, int]) -> None:
    if tuple(shape) != expected or dtype != "bool":
        raise ValueError(
            f"valid must be bool [requests, tokens] = {list(expected)}, True for a token that is one, got {dtype} {list(shape)}"
        )


def check_scales(spec: CacheSpec, scales: Mapping[str, Any], read: Callable[[Any], Any]) -> None:
    """Raise ValueError unless both ``scales`` are None or finite positive [layers, kv_heads]. ``read``: to the host."""
    shape = spec.sizes.layers, spec.sizes.kv_heads
    if len({scale is None for scale in scales.values()}) > 1:
        raise ValueError("k_scale and v_scale go together: pass both, or none to take them from what is written first")
    for name, scale in scales.items():
        if scale is None:
            continue
        if tuple(getattr(scale, "shape", ())) != shape:
            got = list(scale.shape) if hasattr(scale, "shape") else type(scale).__name__
            raise ValueError(f"{name} must be [layers, kv_heads] = {list(shape)}, got {got}")
        known = read(scale)
        for layer, scales_of_layer in enumerate([] if known is None else known.tolist()):
            for head, x in enumerate(scales_of_layer):
                if not (x > 0 and math.isfinite(x)):
                    raise ValueError(f"{name}[{layer}, {head}]={x}: numbers are divided by it, so it must be finite and above 0")


def check_kept(shape: tuple[int, ...], dtype: str, batch: int) -> None:
    if shape not in ((), (batch,)) or "int" not in dtype:
        raise ValueError(f"lengths must be integers [{batch}], one for every request, or one for all, got {dtype} {list(shape)}")


def check_chunk(layout: str | None) -> None:
    if layout is None:
        raise ValueError("expected a step from cache.prefill_step, got one from cache.step")


def check_window(spec: CacheSpec, window: Any) -> int | None:
    """Return ``window``, by default the cache's (None: all). It must not exceed that: older keys may be overwritten."""
    if window is None:
        return spec.window
    if not is_integer(window) or window < 0:
        raise ValueError(f"window must be an int of at least 0, how far a query sees back, or None, got {in_words(window)}")
    if spec.window is not None and window > spec.window:
        raise ValueError(
            f"window={window} sees further back than the {spec.window} that this cache keeps: make it for the widest"
        )
    return int(window)


def check_back(spec: CacheSpec, reached: int, length: int, row: int) -> None:
    """Raise ValueError if a rollback to ``length`` goes more than ``spec.room`` below ``reached``, the greatest length so far:
    a query might need overwritten tokens."""
    if spec.room is not None and length < reached - spec.room:
        raise ValueError(
            f"request {row} was {reached} tokens long and shall go back to {length}: this cache has room for {spec.room}, what "
            "an earlier token sees is overwritten. Make it with more room, or reset the request and fill it again"
        )


def check_no_states(spec: CacheSpec) -> None:
    if spec.states:
        raise ValueError(
            f"this cache holds the states of {len(spec.states)} recurrent layers, which cannot go back to earlier tokens: reset "
            "the request and fill it again, or fork it before the tokens that may be rejected"
        )


def grown(spec: CacheSpec, counts: Sequence[Sequence[int]], tokens: Any) -> CacheSpec:
    """Return the spec of a cache with enough slots for ``tokens`` more tokens of each request, shared evenly by the ranks.
    ``counts`` [requests][ranks]: cached tokens. A rank gets the largest count plus ``tokens / ranks`` slots per request, in whole
    pages, and never fewer than before."""
    if spec.page is None:
        raise ValueError("this cache has a fixed capacity: make it with page=, the tokens of a page, to let it grow")
    if not is_integer(tokens) or tokens < 0:
        raise ValueError(f"tokens must be an int of at least 0, how many more every request may have, got {in_words(tokens)}")
    part = -(-tokens // spec.ranks)
    needed = max(count + part for row in counts for count in row)
    return replace(spec, slots=max(spec.slots, -(-needed // spec.page) * spec.page))


def check_cache(cache: Any, kind: type) -> None:
    if not isinstance(cache, kind):
        raise ValueError(f"cache must be a KVCache, got {in_words(cache)}: make one with KVCache.make(model.config, ...)")


def check_ids(ids: Any, batch: int, is_array: bool) -> None:
    """Raise ValueError if ``ids`` are not integers [requests, tokens] with at least one token. ``is_array``: of the framework."""
    shape, dtype = (tuple(ids.shape), str(ids.dtype)) if is_array else ((), "")
    if len(shape) != 2 or "int" not in dtype:
        got = f"{dtype} {list(shape)}" if is_array else type(ids).__name__
        raise ValueError(f"ids must be integers [requests, tokens], the same on every rank, got {got}")
    if shape[0] != batch or not shape[1]:
        raise ValueError(f"ids must be [{batch}, tokens], a row for every request of the cache, got {list(shape)}")


def check_order(order: str) -> None:
    if order == "global":
        raise ValueError(
            'a step of decoding adds keys in the order of the ranks, so generation cannot keep order="global": make the model '
            'with order="ring", of the same weights. For the attention of a chunk there is prefill(..., order="global")'
        )


def check_whole(spec: CacheSpec, order: str, length: Any, longest: int) -> None:
    """Raise ValueError unless a prefill in ``order`` may have ``length``. ``longest``: most tokens of a request after it."""
    if order == "ring":
        if length is not None:
            raise ValueError(f'length={in_words(length)} goes with order="global": leave it out')
        return
    if spec.float8:
        raise ValueError('a float8 cache rounds keys and values, so prefill cannot keep order="global": make it in q\'s dtype')
    if not is_integer(length) or length < longest:
        raise ValueError(
            f'order="global" needs length, the tokens of the sequence whose training forward has these bits, an int of at least '
            f"{longest}, the tokens of a request after this chunk, got {in_words(length)}"
        )


def check_model(spec: CacheSpec, sizes: Any, dtype: str, windows: Sequence[int | None]) -> None:
    """Raise ValueError if the cache's sizes or dtype differ from the model's, or if a layer's window exceeds the cache's.
    A float8 cache fits any compute dtype. ``windows``: for each layer, the earlier tokens that a query sees; None: all."""
    expected = CacheSizes.of(sizes)
    if spec.sizes != expected:
        raise ValueError(
            f"the cache is for {spec.sizes}, and the model has {expected}: make it with KVCache.make(model.config, ...)"
        )
    if spec.dtype not in (dtype, FP8):
        raise ValueError(
            f"the cache keeps {spec.dtype}, and the model computes in {dtype}: make it with dtype={dtype!r} or {FP8!r}"
        )
    for layer, window in enumerate(windows):
        if spec.window is not None and (window is None or window > spec.window):
            seen = "all tokens before it" if window is None else f"{window} tokens before it"
            raise ValueError(
                f"layer {layer} sees {seen}, and the cache keeps {spec.window}: make it without window, or for the widest layer"
            )
