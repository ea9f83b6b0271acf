"""Drawing tokens in JAX: what the reference draws, what generate draws, and what is refused."""

# pyright: reportCallIssue=false, reportFunctionMemberAccess=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from ring_attn_core.sampling import Sampling
from ring_attn_jax import KVCache, decode_step, prefill_prompts, sample
from ring_attn_jax.inference import sampling as drawing

from ..support.generation import DRAW, PROMPTS
from .ring import mesh_of
from .test_generate import model_of


def draw(logits: Any, **options: Any) -> jax.Array:
    """Draw by one program, where JAX would compile each operation; only logits are traced."""
    return jax.jit(lambda logits: sample(logits, **options))(logits)


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [DRAW, pytest.param({}, marks=pytest.mark.full)], ids=["drawn", "greedy"])
@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.full)])
def test_a_loop_over_steps_draws_what_generate_draws(ranks, options):
    """Steps and draws are compiled as one."""
    with jax.enable_x64(True):
        model = model_of("features", ranks)
        cache = KVCache.make(model.config, 3, 48, dtype="float64", mesh=mesh_of(ranks))
        graph, state = nnx.split(model)

        @jax.jit
        def step(state: Any, tokens: Any, cache: Any) -> Any:
            logits, cache = decode_step(nnx.merge(graph, state), tokens[:, None], cache)
            return sample(logits[:, -1], **options, positions=cache.lengths), cache

        ids = jnp.asarray([[*prompt, *[0] * (21 - len(prompt))] for prompt in PROMPTS])
        prompted = jax.jit(lambda state, ids, cache, n: prefill_prompts(nnx.merge(graph, state), ids, cache, n))
        logits, cache = prompted(state, ids, cache, jnp.asarray([len(prompt) for prompt in PROMPTS]))
        tokens = [sample(logits, **options, positions=cache.lengths)]
        for _ in range(11):
            newest, cache = step(state, tokens[-1], cache)
            tokens.append(newest)
        assert jnp.stack(tokens, 1).tolist() == model.generate(PROMPTS, 12, **options)


@pytest.mark.slow
def test_it_is_a_request_of_its_number_and_not_its_row_also_where_all_is_traced():
    logits, at = jax.random.normal(jax.random.key(0), (5, 300)), jnp.arange(5) * 1000
    options: dict[str, Any] = {"temperature": 2.0, "top_p": 0.9, "seed": -3}
    whole = draw(logits, **options, positions=at)
    traced = jax.jit(lambda logits, requests, at: sample(logits, **options, requests=requests, positions=at))
    assert traced(logits[::-1], jnp.arange(5)[::-1], at[::-1])[::-1].tolist() == whole.tolist()
    assert traced(logits, jnp.arange(5), at + 1).tolist() != whole.tolist()
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert draw(logits[:1], **options, positions=at[:1]).tolist() == whole[:1].tolist()


@pytest.mark.parametrize("bits", [0, 2**32 - 1])
def test_the_noise_is_finite_for_the_least_and_the_greatest_bits(bits, monkeypatch):
    monkeypatch.setattr(drawing, "words", lambda *_: jnp.full((1, 3), bits, jnp.uint32))
    at = jnp.zeros(1, jnp.int32)
    assert jnp.isfinite(drawing.gumbel(Sampling(1.0).parameters, at, at, jnp.arange(3)[None], jnp.float32)).all()


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "seed"])
def test_traced_values_of_static_arguments_are_refused_by_name(name):
    options = {"temperature": 1.0, "positions": [0]}
    with pytest.raises(ValueError, match=f"{name} is traced, .*: make it a static argument of jit"):
        jax.jit(lambda x: sample(jnp.ones((1, 5)), **options | {name: x}))(1)
