"""A few queries over a cache spread over the ranks: exact for random problems; and JAX = PyTorch, in float32 to 1e-6."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ring_attn_core import full
from ring_attn_core.reference.tolerance import relative_error

from ..support.decode import SHAPES, Problem, Shape, check, random_shape, shapes
from ..support.selection import first, in_each


@in_each("number,seeds", jax=shapes(often=3), torch=shapes())
def test_random_problems_are_exact(framework, number, seeds):
    problems = [Problem(random_shape(number), seed) for seed in range(seeds)]
    check(problems, framework.decode(problems))


@in_each("ranks", jax=[2], torch=[1, 2, 3])
def test_unseen_slots_do_not_change_the_output(framework, ranks):
    features = "tree_mask", "window", "scale", "softcap", "sinks", "alibi_slopes"
    problem = Problem(Shape(ranks=ranks, batch=2, queries=5, slots=61, features=features))
    for mine, other in zip(*framework.decode([problem, problem.with_other_unseen()]), strict=True):
        np.testing.assert_array_equal(mine, other)


def given(framework: Any, **changed: Any) -> dict[str, Any]:
    ones = lambda *shape: np.ones(shape, np.float32)
    made = {"q": ones(1, 2, 4, 8), "k": ones(1, 6, 2, 8), "v": ones(1, 6, 2, 5)}
    made |= {"q_positions": np.array([[3, 4]], np.int32), "k_positions": np.arange(6, dtype=np.int32)[None]}
    return framework.arrays(made | changed)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"q": np.ones((2, 4, 8), np.float32)}, r"q must have 4 dimensions \[batch, queries, heads, head_dim\]"),
    ({"q": np.ones((1, 2, 3, 8), np.float32)}, "q has 3 heads and k has 2: kv heads must divide"),
    ({"k": np.ones((1, 6, 2, 8), np.float16)}, "must both have q's dtype, float32, or both float8_e4m3fn, got k float16"),
    ({"q_positions": np.array([[3.0, 4.0]], np.float32)}, "q_positions must have an integer dtype, got float32"),
    ({"tree_mask": np.ones((1, 2, 3), bool)}, r"tree_mask must be \[batch, queries, queries\] = \[1, 2, 2\]"),
    ({"sinks": np.ones(3, np.float32)}, r"sinks must be \[heads\] = \[4\]"),
    ({"k_scale": np.ones(2, np.float32)}, "k_scale is for k and v of float8_e4m3fn, and these are float32"),
    ({"window": -1}, "window=-1: a query sees itself"),
    ({"softcap": math.inf}, "softcap must be a Python number above 0"),
    ({"backend": "abacus"}, "unknown backend 'abacus' for decoding"),
    ({"backend": "triton"}, 'backend="triton" cannot decode this: its kernels run on NVIDIA GPUs.*"blockwise" can'),
]


@pytest.mark.parametrize(("changed", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_a_mistake_says_what_to_do(framework, changed, message):
    arrays = given(framework, **changed)
    with pytest.raises(ValueError, match=message):
        framework.decode_alone(**arrays)


@pytest.mark.parametrize("dtype", ["int64", "uint8", *first(["uint32", "int16"], 0)])
def test_positions_may_have_any_integer_dtype(framework, dtype):
    expected = framework.numpy(framework.decode_alone(**given(framework)))
    with framework.x64():
        wide = {"q_positions": np.array([[3, 4]], dtype), "k_positions": np.arange(6, dtype=dtype)[None]}
        np.testing.assert_array_equal(framework.numpy(framework.decode_alone(**given(framework, **wide))), expected)


@pytest.mark.parametrize("ranks", first([3, 1]))
def test_merging_over_the_ring_is_the_whole(framework, ranks):
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 4 * ranks, 2, 8), np.float32)
    whole = framework.attend_block(*map(framework.array, (q, k, v)), mask=full())
    for mine, other in zip(framework.merged_over_ring(ranks, q, k, v), whole, strict=True):
        np.testing.assert_allclose(mine, framework.numpy(other), atol=1e-6)
    with pytest.raises(ValueError, match=r"merge_ring takes a pair \(out, lse\)"):
        framework.merge_ring(framework.array(q))


@pytest.mark.parametrize("number", first(number for number in range(2, SHAPES) if random_shape(number).dtype == "float32"))
def test_both_frameworks_give_the_same_numbers(frameworks, number):
    problems = [Problem(random_shape(number), seed) for seed in range(2)]
    for ours, theirs in zip(*(each.decode(problems) for each in frameworks), strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert relative_error(mine, other) <= 1e-6
