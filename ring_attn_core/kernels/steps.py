"""The launches of a step of the ring: Hopper's kernels if they take a call, else the portable ones."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from .call import RingCall
from .hopper import launches as hopper
from .hopper.supports import refusal, refusal_of_backward
from .launch import Launch
from .portable import launches as portable


def of_forward(call: RingCall, steps: int) -> Iterator[Launch]:
    """Yield each different launch of the forward of a ring of ``steps`` steps."""
    if "key_mask" in call.given:
        yield portable.unpack_key_mask(call.batch, call.kv_local)
    if "dropout_seed" in call.given:
        yield portable.dropout_streams(call.batch, call.heads)
    for first, last in _ends(steps):
        yield forward(call, first, last)


def of_backward(call: RingCall, steps: int) -> Iterator[Launch]:
    """Yield each different launch of the backward that the forward does not have."""
    yield portable.delta(call, call.dtype)
    if "extents" in call.given:
        yield extent_bounds(call)
    for first, last in _ends(steps):
        if in_one_pass(call):
            yield hopper.backward(call, first, first and last)
            yield hopper.dq(call)
        else:
            yield portable.dq(call, first, last)
            yield portable.dkv(call, first, first and last)


def _ends(steps: int) -> list[tuple[bool, bool]]:
    """Return the pairs (is first step, is last step) that occur in a ring of ``steps`` steps."""
    return sorted({(step == 0, step == steps - 1) for step in range(steps)})


@lru_cache(maxsize=4096)
def in_one_pass(call: RingCall) -> bool:
    """Return whether one launch, ``hopper.backward``, computes all gradients of a step, in place of ``dq`` and ``dkv``."""
    return call.hopper and "backward" not in call.portable and refusal_of_backward(call) is None


@lru_cache(maxsize=4096)
def forward(call: RingCall, first: bool, last: bool) -> Launch:
    """Return the launch that merges the keys of one shard into (out, lse)."""
    launch = portable.forward(call, first, last)
    takes = call.hopper and "forward" not in call.portable and refusal(call) is None
    return hopper.forward(call, launch) if takes else launch


@lru_cache(maxsize=4096)
def extent_bounds(call: RingCall) -> Launch:
    """Return the launch that computes the extent bounds of the backward's query tiles."""
    return portable.extent_bounds(call, hopper.queries(call) if in_one_pass(call) else call.tiles("dkv").block_q)
