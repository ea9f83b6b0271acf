"""Arguments that are refused: a dropout seed without a rate, which nothing would use, and keywords of other libraries."""

from __future__ import annotations

import inspect
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax.sharding import PartitionSpec as P

import ring_attn_jax
import ring_attn_torch
from ring_attn_core.keywords import ELSEWHERE

from .jax.ring import mesh_of
from .support.models import TRANSFORMER
from .support.selection import first
from .support.spawn import PerRank

X = np.random.default_rng(0).standard_normal((1, 8, 2, 4)).astype(np.float32)
MESSAGE = "dropout_seed was given without dropout_rate, and nothing would be dropped: pass dropout_rate="


def on_shards(**given: Any) -> Any:
    spec = P(None, "seq")
    call = partial(ring_attn_jax.ring_attention, **given)
    return jax.jit(jax.shard_map(call, mesh=mesh_of(2), in_specs=(spec,) * 3, out_specs=spec))(*[jnp.asarray(X)] * 3)


CALLS = {
    "ring_attn_torch.ring_attention": lambda **given: ring_attn_torch.ring_attention(*[torch.from_numpy(X)] * 3, **given),
    "ring_attn_torch.attend_block": lambda **given: ring_attn_torch.attend_block(*[torch.from_numpy(X)] * 3, **given)[0],
    "ring_attn_jax.ring_attention": on_shards,
    "ring_attn_jax.attend_block": lambda **given: ring_attn_jax.attend_block(*[jnp.asarray(X)] * 3, **given)[0],
    "ring_attn_jax.sharded_ring_attention": lambda **given: jax.jit(
        partial(ring_attn_jax.sharded_ring_attention, mesh=mesh_of(2), **given)
    )(*[jnp.asarray(X)] * 3),
}


CASES = [(0, name) for name in CALLS] + [(7, name) for name in CALLS]  # the last three in JAX, which compiles four programs


@pytest.mark.parametrize(("seed", "name"), first(CASES, 3, most=7))
def test_a_seed_without_a_rate_is_refused_and_a_rate_of_0_drops_nothing(name, seed):
    call = CALLS[name]
    with pytest.raises(ValueError, match=MESSAGE):
        call(dropout_seed=seed)
    none = np.asarray(call())
    np.testing.assert_array_equal(np.asarray(call(dropout_rate=0.0, dropout_seed=seed)), none)
    np.testing.assert_array_equal(np.asarray(call(dropout_rate=0.0)), none)
    assert not np.array_equal(np.asarray(call(dropout_rate=0.5, dropout_seed=seed)), none)


def test_one_rank_that_passes_a_seed_without_a_rate_leaves_no_other_waiting(gloo):
    gloo.refuse(re.escape(MESSAGE), 2, torch_on_rank, PerRank({}, {"dropout_seed": 1}))


def torch_on_rank(group: Any, given: dict[str, Any]) -> None:
    ring_attn_torch.ring_attention(*[torch.from_numpy(X)] * 3, group=group, **given)


@pytest.mark.exhaustive
def test_a_model_without_dropout_takes_the_seed_of_one_with_it():
    """So that a training loop is the same for every rate."""
    ids = np.zeros((1, 4), np.int32)
    model = ring_attn_torch.RingTransformer(**TRANSFORMER)
    assert torch.equal(model(torch.from_numpy(ids), dropout_seed=1), model(torch.from_numpy(ids)))
    ours = ring_attn_jax.RingTransformer(**TRANSFORMER, mesh=mesh_of(1), rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(ours(jnp.asarray(ids), dropout_seed=1), ours(jnp.asarray(ids)))


@pytest.mark.parametrize("call", ["ring_attention", "attend_block", "dilated_attention", "summary_attention"])
def test_a_keyword_of_another_library_is_answered_alike_in_both_packages(call: str):
    for keyword in {*ELSEWHERE} - {*inspect.signature(getattr(ring_attn_torch, call)).parameters}:
        answers = []
        for package in (ring_attn_jax, ring_attn_torch):
            with pytest.raises(
                TypeError, match=rf"{call}\(\) has no argument '{keyword}'.*help\(\) lists its arguments"
            ) as error:
                getattr(package, call)(**{keyword: 1})
            answers.append(str(error.value))
        assert answers[0] == answers[1] or "group" in answers[1]  # JAX has axis_name
        assert call != "ring_attention" or f": pass {ELSEWHERE[keyword]}." in answers[1]
