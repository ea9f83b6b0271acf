"""The launches of a step of the ring: Hopper's kernels if they accept the call, else the portable kernels."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from .call import RingCall
from .hopper import launches as hopper
from .hopper import wide_launches as wide
from .hopper.supports import columns, refusal
from .launch import Launch
from .portable import extent_launches
from .portable import launches as portable
from .tile_sizes import HOPPER_BACKWARD_KEYS, hopper_passes


def of_forward(call: RingCall, steps: int) -> Iterator[Launch]:
    """Yield each different launch in the forward of a ring of ``steps`` steps."""
    if "key_mask" in call.array_names:
        yield portable.unpack_key_mask(call.batch, call.kv_local)
    if "dropout_seed" in call.array_names:
        yield portable.philox_keys(call.batch, call.heads)
    call = call.of_own_queries
    yield from lists(call, "forward")
    for first, last in _ends(steps):
        yield forward(call, first, last)


def of_backward(call: RingCall, steps: int) -> Iterator[Launch]:
    """Yield the backward's own launches, some repeatedly. The backward also uses the results of the forward's."""
    yield portable.delta(call, call.dtype)
    if "extents" in call.array_names:
        yield extent_bounds(call)
    for first, last in _ends(steps):
        if in_one_pass(call):
            yield from lists(call, "backward")
            yield hopper.backward(call, not call.packed)
            yield hopper.dq(call)
        else:
            for_queries, for_keys = call.of_own_queries, call.of_own_keys
            yield from lists(for_queries, "dq")
            yield from lists(for_keys, "dkv")
            yield dq(for_queries, first, last)
            yield dkv(for_keys, first, not call.packed)


def _ends(steps: int) -> list[tuple[bool, bool]]:
    """Return the different pairs (is first step, is last step) in a ring of ``steps`` steps."""
    return sorted({(step == 0, step == steps - 1) for step in range(steps)})


@lru_cache(maxsize=4096)
def in_one_pass(call: RingCall) -> bool:
    """Return whether one launch, ``hopper.backward``, computes all gradients of a step; else ``dq`` and ``dkv`` do."""
    widths = columns(call.head_dim), columns(call.v_dim)
    group = call.heads // call.kv_heads
    if call.ordered:  # in one pass the order of the sums dq is that of the programs
        return False
    return _takes(call, "backward") and hopper_passes(*widths, group, call.kv_local, "extents" in call.array_names) == 1


def _takes(call: RingCall, name: str) -> bool:
    """Return whether Hopper's kernels run the pass ``name``, "forward" or "backward", of a call."""
    return call.hopper and name not in call.portable and refusal(call) is None


def zeroes_queries(call: RingCall) -> bool:
    """Return whether the kernels of the backward zero fully masked queries and their dout, which may hold NaN."""
    return _takes(call, "backward")


@lru_cache(maxsize=4096)
def forward(call: RingCall, first: bool, last: bool) -> Launch:
    """Return the launch that merges one shard of keys into (out, lse). ``first``, ``last``: the ring's first, last step."""
    launch = portable.forward(call, first, last)
    return hopper.forward(call, launch) if _takes(call, "forward") else launch


@lru_cache(maxsize=4096)
def dq(call: RingCall, first: bool, last: bool) -> Launch:
    """Return the launch that adds one shard of keys to dq, in a backward of two launches."""
    launch = portable.dq(call, first, last)
    return wide.dq(call, launch) if _takes(call, "backward") else launch


@lru_cache(maxsize=4096)
def dkv(call: RingCall, first: bool, last: bool) -> Launch:
    """Return the launch that computes dk and dv of one shard of keys, in a backward of two launches."""
    launch = portable.dkv(call, first, last)
    return wide.dkv(call, launch) if _takes(call, "backward") else launch


@lru_cache(maxsize=4096)
def lists(call: RingCall, kernel: str) -> tuple[Launch, ...]:
    """Return the launches that compute a Hopper kernel's inputs from extents or key extents, without ``extent_bounds``."""
    if not call.by_extents or not _takes(call, "forward" if kernel == "forward" else "backward"):
        return ()
    by_keys = "key_extents" in call.array_names
    if kernel in ("backward", "dkv"):
        one_pass = hopper.queries(call), HOPPER_BACKWARD_KEYS
        sizes = one_pass if kernel == "backward" else (wide.tiles_of(call).dkv_block_q, wide.BLOCK_K)
        found = _intervals(call, *sizes, whole=False) if by_keys else ()
        ranges = (extent_launches.key_ranges(call),) if "extents" in call.array_names else ()
        return *found, *ranges, extent_launches.query_tiles(call, *sizes)
    tiles = hopper.tiles_of_forward(call) if kernel == "forward" else wide.tiles_of(call)
    sizes = tiles.block_q, tiles.block_k
    found = _intervals(call, *sizes, whole=True) if by_keys else (extent_launches.key_tiles(call, *sizes),)
    found = *found, extent_launches.tile_order(call, tiles.block_q)
    return *found, extent_launches.not_finite(call, values=kernel == "forward")


def _intervals(call: RingCall, block_q: int, block_k: int, whole: bool) -> tuple[Launch, ...]:
    return extent_launches.key_bounds(call, block_k), extent_launches.intervals(call, block_q, block_k, whole)


@lru_cache(maxsize=4096)
def extent_bounds(call: RingCall) -> Launch:
    """Return the launch that computes, for each query tile of the backward, the bounds of its extents."""
    if in_one_pass(call):
        return extent_launches.extent_bounds(call, hopper.queries(call))
    return extent_launches.extent_bounds(
        call, wide.tiles_of(call).dkv_block_q if _takes(call, "backward") else call.tiles("dkv").block_q
    )
