"""The programs of decode_step and prefill_prompts in JAX: what compiles once, and what is traced anew."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ring_attn_core.reference.tolerance import relative_error
from ring_attn_jax import KVCache, RingTransformer, decode_step, prefill_prompts
from ring_attn_jax.inference import forward

from .ring import mesh_of

IDS = jnp.asarray([[3, 1, 4, 1], [5, 9, 2, 6]])


def model_and_cache() -> tuple[RingTransformer, KVCache]:
    model = RingTransformer(vocab=31, dim=16, depth=1, heads=2, mesh=mesh_of(2), rngs=nnx.Rngs(0))
    return model, KVCache.make(model.config, 2, 24, mesh=mesh_of(2))


@pytest.mark.exhaustive
def test_outside_jit_a_step_and_a_chunk_compile_once():
    """Each trace calls one of the two functions; chunks of other lengths with the same longest one are one program."""
    model, kept = model_and_cache()
    traced: list[str] = []

    def counted(function: Any) -> Any:
        return lambda *arguments: (traced.append(function.__name__), function(*arguments))[1]

    with patch.multiple(forward, decoded=counted(forward.decode_tokens), last_hidden=counted(forward.last_hidden)):
        for lengths in ([4, 3], [2, 4]):
            _, kept = prefill_prompts(model, IDS, kept, lengths)
        _, after = decode_step(model, IDS[:, :1], kept)
        outside, _ = decode_step(model, IDS[:, 1:2], after)
    assert traced == ["last_hidden", "decoded"]
    assert after.lengths.tolist() == [7, 8]
    step = jax.jit(lambda ids, kept: decode_step(model, ids, kept))
    inside, _ = step(IDS[:, 1:2], step(IDS[:, :1], kept)[1])
    assert relative_error(np.asarray(outside), np.asarray(inside)) <= 1e-6


def test_a_new_jit_sees_what_changed_in_an_adapter():
    model, kept = model_and_cache()
    held = {"factor": jnp.ones(())}
    model.blocks[0].attention.o.adapter = lambda x: x * held["factor"]

    def step(factor: jax.Array) -> jax.Array:
        held["factor"] = factor  # traced: no program may keep it
        return decode_step(model, IDS[:, :1], kept)[0]

    once, twice = (np.asarray(jax.jit(lambda x: step(x))(jnp.float32(factor))) for factor in (1, 2))
    assert relative_error(once, twice) > 1e-2


def test_a_model_may_hold_what_has_no_hash():
    model, kept = model_and_cache()
    expected, _ = decode_step(model, IDS[:, :1], kept)
    model.blocks[0].attention.o.notes = nnx.static({"held": 1})
    for step in (decode_step, nnx.jit(decode_step)):
        np.testing.assert_array_equal(step(model, IDS[:, :1], kept)[0], expected)


def test_fresh_may_be_read_from_the_cache():
    model, kept = model_and_cache()
    first, _ = prefill_prompts(model, IDS, kept, fresh=True)
    for fresh in ((kept.lengths == 0).all(), np.array(True)):
        np.testing.assert_array_equal(prefill_prompts(model, IDS, kept, fresh=fresh)[0], first)
