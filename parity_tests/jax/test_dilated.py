"""Dilated attention in JAX against a dense float64 oracle: out, lse and every gradient within the computed bound."""

# pyright: reportArgumentType=false

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ring_attn_core import full
from ring_attn_jax import dilated_attention, sharded_dilated_attention

from ..support.dilated import CASES, PUBLISHED, Case, check, drawn
from ..support.selection import first
from .dilated import run, run_anew
from .ring import SEQ, mesh_of

IN_CI = [CASES[2], CASES[13]]


@pytest.mark.slow
@pytest.mark.parametrize("case", first([*IN_CI, *(case for case in CASES if case not in IN_CI)], 1, 2), ids=str)
def test_out_lse_and_gradients_are_exact(case):
    check(case, run(case))


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("mixing", ["softmax", "heads"])
def test_every_ring_is_exact_at_an_odd_length(mixing, ranks):
    check(case := Case((7, 12, 90), (1, 4, 3), ranks, -(-37 // ranks), 4, 2, mixing, length=37), run(case))


@pytest.mark.full
def test_the_published_setting_is_exact():
    check(PUBLISHED, run(PUBLISHED))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
def test_random_configurations_are_exact(seed):
    check(case := drawn(np.random.default_rng(seed), 4), run(case))


def test_future_tokens_change_nothing_on_any_rank():
    case, token = CASES[2], 9
    later = {name: np.concatenate([x[:, :token], -3 * x[:, token:]], 1) for name, x in case.arrays.items() if name in "qkv"}
    before, after = run(case), run_anew(replace(case).given(**later))
    for name in ("out", "lse"):
        np.testing.assert_array_equal(getattr(before, name)[:, :token], getattr(after, name)[:, :token])
    assert (before.out[:, token:] != after.out[:, token:]).any()


def arrays(heads=4, kv_heads=4, tokens=16):
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (2, tokens, h, 8)) for key, h in zip(keys, (heads, kv_heads, kv_heads), strict=True)]


@pytest.mark.exhaustive
def test_whole_arrays_over_every_mesh_axis_give_the_same():
    q, k, v = arrays(kv_heads=2)
    key_mask = jax.random.bernoulli(jax.random.key(1), 0.8, (2, 16))
    asked = {"segments": (6,), "dilations": (2,), "key_mask": key_mask, "return_lse": True}
    alone = sharded_dilated_attention(q, k, v, mesh=mesh_of(1), **asked)
    mesh = jax.make_mesh((2, 2, 2), ("data", "seq", "model"))
    spread = sharded_dilated_attention(q, k, v, mesh=mesh, batch_axes="data", head_axis="model", **asked)
    for a, b in zip(alone, spread, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"segments": (8, 8)}, "strictly increasing"),
        ({"dilations": (1, 3)}, "a dilation must divide its segment"),
        ({"mixing": "heads", "segments": (1, 2, 3, 4, 5), "dilations": (1,) * 5}, "got 5 patterns for 4 heads"),
        ({"length": 40}, "length=40 is more than"),
        ({"key_mask": jnp.ones((2, 3), bool)}, "key_mask must be"),
    ],
)
def test_what_does_not_fit_is_refused_when_it_is_traced(wrong, message):
    q, k, v = arrays()
    with pytest.raises(ValueError, match=message):
        sharded_dilated_attention(q, k, v, mesh=mesh_of(2), **{"segments": (4, 8), "dilations": (1, 2), **wrong})


@pytest.mark.parametrize("wrong", [{"dilations": (1, 4)}, {"mixing": "heads"}])
def test_heads_that_would_keep_other_tokens_on_another_member_are_refused(wrong):
    mesh = jax.make_mesh((2, 2), ("seq", "model"), devices=jax.devices()[:4])
    with pytest.raises(ValueError, match="every member holds 2 heads"):
        sharded_dilated_attention(*arrays(), mesh=mesh, head_axis="model", **{"segments": (4, 8), "dilations": (1, 2), **wrong})


def test_keys_travel_only_between_ranks_that_share_a_segment():
    def program(segments: tuple[int, ...]) -> str:
        call = lambda q, k, v: dilated_attention(q, k, v, segments=segments, dilations=(1,), mask=full())
        return str(jax.make_jaxpr(jax.shard_map(call, mesh=mesh_of(4), in_specs=(SEQ,) * 3, out_specs=SEQ))(*arrays()))

    assert [program(segments).count("ppermute[") for segments in ((4,), (8,), (16,))] == [0, 2, 3]


@pytest.mark.parametrize(("huge", "same"), [((3 * 2**30, 3), (9, 3)), ((2**40, 2**40), (8, 8))])
def test_patterns_of_more_tokens_than_int32_counts_are_those_of_the_whole_sequence(huge, same):
    q, k, v = (jnp.asarray(x) for x in np.random.default_rng(0).standard_normal((3, 1, 8, 2, 4), np.float32))
    attend = lambda segment, dilation: sharded_dilated_attention(
        q, k, v, mesh=mesh_of(1), segments=(segment,), dilations=(dilation,)
    )
    np.testing.assert_array_equal(attend(*huge), attend(*same))


def test_no_tokens_give_no_tokens():
    q = jnp.ones((2, 0, 4, 8))
    out = sharded_dilated_attention(q, q, q, mesh=mesh_of(1), segments=(4, 8), dilations=(2, 1))
    assert out.shape == q.shape
