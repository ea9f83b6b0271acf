"""Tests of the values that a call of attention keeps and hands on in JAX, on one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ring_attn_core import full
from ring_attn_core.problem.options import Options
from ring_attn_jax import attend_block
from ring_attn_jax.call import decide
from ring_attn_jax.call.autograd import decide_forward
from ring_attn_jax.call.prepare import Arrays, problem_of


def test_slopes_weigh_keys_by_their_distance():
    q, v = jnp.zeros((1, 5, 2, 4)), jax.random.normal(jax.random.key(0), (1, 5, 2, 4))
    slopes = np.array([0.5, 2.0])
    weights = jax.nn.softmax(slopes[:, None, None] * (np.arange(5)[None, :] - np.arange(5)[:, None]), -1)
    out, _ = jax.jit(lambda q, v, s: attend_block(q, q, v, mask=full(), alibi_slopes=s))(q, v, np.float32(slopes))
    np.testing.assert_allclose(out, jnp.einsum("hqk,bkhd->bqhd", weights, v), atol=1e-5)


@pytest.mark.parametrize("backend", ["auto", "blockwise"])
def test_a_backend_by_name_reads_values_as_an_array_where_a_gradient_is_wanted(backend):
    """Its backward reads them so, and a name stands for both passes."""
    q, k = jnp.zeros((1, 6, 2, 8)), jnp.zeros((1, 6, 1, 8))
    problem = problem_of(q, k, k[..., :4], Arrays(), 1, Options(layout="contiguous", backend=backend, v_dim=4))
    decision = decide.decide(problem)
    assert decision.problem.options.values_in_keys
    assert decide_forward(decision).problem.options.values_in_keys == (backend == "auto")


@pytest.mark.parametrize(
    ("backend", "asked"),
    [("auto", [("forward",), ("backward",)]), ("blockwise", [("forward", "backward")])],
    ids=["auto", "by name"],
)
def test_auto_compiles_the_backward_when_it_comes_and_a_name_compiles_both_at_once(monkeypatch, backend, asked):
    q, passes, began = jnp.zeros((1, 6, 2, 8)), [], []
    monkeypatch.setattr(decide, "runnable", lambda problem, any_position, of: passes.append(tuple(of)))
    monkeypatch.setattr(decide, "begin_backward", lambda *_: began.append(len(passes)))
    decision = decide.decide(problem_of(q, q, q, Arrays(), 1, Options(backend=backend)))
    assert passes == asked[:1]
    assert began == ([0] if backend == "auto" else []), "before the forward is compiled"
    for _ in range(2):
        assert decision.backward.backend
    assert passes == asked
