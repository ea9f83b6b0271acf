"""Values that are columns of keys: exact in every ring, strategy and feature, in a block too, and what is refused."""

# pyright: reportArgumentType=false

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ring_attn_core import LAYOUTS, Run, causal

from ..support.balanced import in_balanced_layout
from ..support.cases import Case, check, check_same
from ..support.combinations import EVERYTHING
from ..support.selection import first, in_each, one_of_each
from ..support.strategies import STRATEGIES, fitted

LATENT = Case(head_dim=24, v_dim=16, heads=4, kv_heads=1, values_in_keys=True)
MASKED = replace(LATENT, extents="any", key_mask="random", key_extents="any", softcap=2.0, sinks=True, alibi=True)
EVERY_FEATURE = replace(MASKED, head_dim=20, v_dim=13, dropout_rate=0.3, dtype="bfloat16")
IN_JAX = [fitted(replace(EVERY_FEATURE, strategy=strategy)) for strategy in ("auto", *STRATEGIES.values())]
IN_TORCH = [
    fitted(replace(case, strategy=strategy, kv_heads=1, head_dim=20, v_dim=13, values_in_keys=True))
    for case, strategy in zip(EVERYTHING * 2, ["auto", *STRATEGIES.values()], strict=False)
]
SIZES = [replace(LATENT, layout=layout, ranks=ranks) for ranks, layout in zip((3, 2, 1, 4, 8), [*LAYOUTS] * 2, strict=False)]


@in_each("case", jax=first(SIZES, 0), torch=SIZES, slow="jax")
def test_rings_of_every_size_are_exact(framework, case):
    check(case, framework.attention(case, once=True))


@in_each("case", jax=first(IN_JAX), torch=one_of_each(2, IN_TORCH))
@pytest.mark.slow
def test_every_feature_at_once_is_exact_and_hides_nan(framework, case):
    clean = framework.attention(case)
    check(case, clean)
    check_same(framework.attention(replace(case, poison=True)), clean)


@in_each("ranks", jax=first([3], 0), torch=[3])
def test_a_balanced_layout_is_exact(framework, ranks):
    case = in_balanced_layout(replace(LATENT, ranks=ranks, extents="documents", strategy="direct"), 0)
    check(case, framework.attention(case, once=True))


def drawn() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((2, 10, heads, 24), np.float32) for heads in (4, 1)]


def test_a_block_takes_it_too(framework):
    runs = {"q_run": Run(3, 9), "k_run": Run(0, 8), "mask": causal()}
    ours, theirs = (
        framework.pull(lambda q, k, given=given: framework.attend_block(q, k, **given(k), **runs), drawn())
        for given in (lambda k: {"v_dim": 16}, lambda k: {"v": k[..., :16]})
    )
    for a, b in zip((*ours[0], *ours[1]), (*theirs[0], *theirs[1]), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "v is None: pass v, or v_dim="),
        ({"v_dim": 25}, "v_dim must be an int of 1 to 24"),
        ({"v_dim": 16, "v": np.zeros((2, 10, 1, 8), np.float32)}, "v_dim is for v=None"),
    ],
)
def test_an_invalid_v_dim_is_refused(framework, given, message):
    for call in (framework.attend_block, framework.ring_attention, framework.alone("ring_attention")):
        with pytest.raises(ValueError, match=message):
            call(*map(framework.array, drawn()), **framework.arrays(given))


@pytest.mark.parametrize("wrong", [1.0, "k", None], ids=str)
def test_a_k_that_is_not_an_array_is_refused_as_ever(framework, wrong):
    for call in (framework.attend_block, framework.alone("ring_attention")):
        with pytest.raises(ValueError, match=r"must be arrays|k must"):
            call(framework.array(drawn()[0]), wrong, v_dim=16)
