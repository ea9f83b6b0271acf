"""Blocks that keep their input and attention's (out, lse) alone; their backward computes the rest again, without the ring.

jax.checkpoint computes it again. What is here is its policy, by the names that these arrays carry: they stay on the device, or
wait in host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from ring_attn_core.model.activations import check_activations

from ..op import LSE_NAME, OUT_NAME

INPUT_NAME = "ring_attn_block_input"
HOST = "pinned_host"
"""The kind of memory that arrays wait in."""

Module = TypeVar("Module", bound=nnx.Module)
Caller = Callable[..., jax.Array]
"""Takes a function of a block and of its input, and these, and calls it; keeps as little as was asked for."""


def caller(activations: str) -> Caller | None:
    """Return what calls the blocks; None where they keep all.

    ``activations``: "keep", "recompute" or "offload"; ValueError for anything else, and for "offload" on devices without HOST.
    """
    check_activations(activations)
    if activations == "keep":
        return None
    policies = jax.checkpoint_policies
    if activations == "recompute":
        return _with(policies.save_only_these_names(INPUT_NAME, OUT_NAME, LSE_NAME))
    device = jax.local_devices()[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST not in kinds:
        raise ValueError(
            f'activations="offload" needs memory of the kind {HOST!r}, and {device.device_kind} has {", ".join(kinds)}: '
            'use activations="recompute"'
        )
    names = [INPUT_NAME, OUT_NAME, LSE_NAME]
    offloaded = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=names, offload_src="device", offload_dst=HOST
    )
    return _with(offloaded)


def _with(policy: Callable[..., Any]) -> Caller:
    def call(function: Callable[[Module, jax.Array], jax.Array], block: Module, x: jax.Array) -> jax.Array:
        graph, state = nnx.split(block)

        def again(state: nnx.State, x: jax.Array) -> jax.Array:
            return function(nnx.merge(graph, state), checkpoint_name(x, INPUT_NAME))

        return jax.checkpoint(again, policy=policy)(state, x)

    return call
