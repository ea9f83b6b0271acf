"""Blocks merged are the whole: attend_block and merge against float64, on runs of every stride, gradients through both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ring_attn_core import Run, causal, full
from ring_attn_core.reference.oracle import Attention

from ..support.blocks import CASES, cuts
from ..support.cases import Case, check
from ..support.selection import first, in_each
from .framework import library

BLOCKS = [(case, cut) for i, case in enumerate(CASES) for cut in (*cuts()[2 - i % 3 :], *cuts()[: 2 - i % 3])]
"""Pairs of a case and a cut: every third is the first of its case, and their cuts differ."""

IN_TURN = [*BLOCKS[::3], *BLOCKS[1::3], *BLOCKS[2::3]]


@in_each("case,cut", jax=first(IN_TURN, 0, 4), torch=first(IN_TURN, len(CASES)))
def test_blocks_merged_are_the_whole(framework, case, cut):
    leaves = [*(framework.array(case.arrays[name], case.dtype) for name in "qkv"), case.features["sinks"]]
    features = framework.arrays({name: x for name, x in case.features.items() if name != "sinks"})
    call = lambda *arrays: in_blocks(framework, case, cut, features, *arrays)
    with framework.tiles(case):
        got, gradients = framework.pull(call, leaves, [case.arrays["dout"], case.arrays["dlse"]])
    check(case, Attention(*got, *gradients))


def in_blocks(framework: Any, case: Case, cut: Any, features: Any, q: Any, k: Any, v: Any, sinks: Any) -> tuple[Any, Any]:
    """Every block of queries over every block of keys, merged with the sink, back in natural order."""
    outs, lses = [], []
    zeros = lambda *shape: framework.array(np.zeros(shape, np.float32))
    options = {**case.scalars, "mask": case.mask, "alibi_slopes": features.get("alibi_slopes")}
    for q_run in cut.runs(q.shape[1]):
        i = np.array(q_run.positions())
        rows = q[:, i].shape[:3]
        total = zeros(*rows, v.shape[-1]), zeros(*rows) + sinks
        for k_run in cut.runs(k.shape[1]):
            j = np.array(k_run.positions())
            own = {"extents": i, "key_extents": j, "key_mask": j}
            masks = {name: x[:, own[name]] for name, x in features.items() if name in own}
            block = framework.attend_block(q[:, i], k[:, j], v[:, j], q_run=q_run, k_run=k_run, **masks, **options)
            total = framework.merge(total, block)
        outs.append(total[0])
        lses.append(total[1])
    order = np.argsort([position for run in cut.runs(q.shape[1]) for position in run.positions()])
    return library(q).concatenate(outs, 1)[:, order], library(q).concatenate(lses, 1)[:, order]


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def test_tokens_of_a_block_beyond_its_runs_are_never_read(framework):
    q, k, v = drawn(3, 1, 8, 2, 4)
    (want, _), _ = framework.pull(lambda *x: framework.attend_block(*x, mask=full()), [q[:, :5], k[:, :6], v[:, :6]])
    for x, length in ((q, 5), (k, 6), (v, 6)):
        x[:, length:] = np.nan
    call = lambda *x: framework.attend_block(*x, mask=full(), q_run=Run(0, 5), k_run=Run(0, 6))
    (out, lse), gradients = framework.pull(call, [q, k, v], [np.ones((1, 8, 2, 4)), np.zeros((1, 8, 2))])
    np.testing.assert_allclose(out[:, :5], want, atol=1e-6)
    assert (out[:, 5:] == 0).all()
    assert (lse[:, 5:] == -np.inf).all()
    for gradient, length in zip(gradients, (5, 6, 6), strict=True):
        assert np.isfinite(gradient).all()
        assert (gradient[:, length:] == 0).all()


def test_merging_with_nothing_changes_nothing_and_gives_no_nan(framework):
    pair = [drawn(1, 3, 2, 4), drawn(1, 3, 2)]
    nothing = framework.array(0 * pair[0]), framework.array(0 * pair[1] - np.inf)
    for call in (lambda *x: framework.merge(x, nothing), lambda *x: framework.merge(nothing, x)):
        merged, gradients = framework.pull(call, pair)
        for mine, same in zip(merged, pair, strict=True):
            np.testing.assert_allclose(mine, same, atol=1e-6)
        for gradient in gradients:
            np.testing.assert_allclose(gradient, 1, atol=1e-6)
    out, lse = map(framework.numpy, framework.merge(nothing, nothing))
    assert (out == 0).all()
    assert (lse == -np.inf).all()


def test_a_list_of_pairs_is_merged_as_two_by_two(framework):
    rng = np.random.default_rng(0)
    shapes = [(1, 5, 2, 4), (1, 5, 2)] * 4
    leaves = [(1 if len(shape) > 3 else 30) * rng.standard_normal(shape, np.float32) for shape in shapes]
    nothing = framework.array(np.zeros((1, 5, 2, 4), np.float32)), framework.array(np.full((1, 5, 2), -np.inf, np.float32))
    pairs = lambda x: [*zip(x[::2], x[1::2], strict=True)]
    merge = framework.merge
    results = [
        framework.pull(call, leaves, [drawn(1, 5, 2, 4), drawn(1, 5, 2)])
        for call in (
            lambda *x: merge([*pairs(x), nothing]),
            lambda *x: merge(merge(*pairs(x)[:2]), merge(*pairs(x)[2:])),
            lambda *x: merge(merge(pairs(x)[3], pairs(x)[1]), merge(pairs(x)[0], pairs(x)[2])),
        )
    ]
    for other in results[1:]:
        for mine, same in zip((*results[0][0], *results[0][1]), (*other[0], *other[1]), strict=True):
            np.testing.assert_allclose(mine, same, atol=1e-5)
    arrays = [*map(framework.array, leaves)]
    assert (framework.numpy(merge([pairs(arrays)[0]])[0]) == leaves[0]).all()
    for wrong in ([], pairs(arrays)[0], [pairs(arrays)[0], 3], None):
        with pytest.raises(ValueError, match=r"merge takes two pairs \(out, lse\), or a list of them"):
            merge(wrong)


def test_the_values_of_an_identity_give_the_weights_of_attention(framework):
    q, k = (np.random.default_rng(heads).standard_normal((1, 9, heads, 8), np.float32) for heads in (4, 2))
    identity = np.broadcast_to(np.eye(9, dtype=np.float32)[None, :, None], (1, 9, 2, 9))
    weights, _ = framework.attend_block(*map(framework.array, (q, k, identity)), mask=causal())
    scores = 8**-0.5 * np.einsum("bshd,bthd->bsht", q, k.repeat(2, 2))
    exact = np.exp(np.where(np.tri(9, dtype=bool)[None, :, None], scores, -np.inf))
    exact /= exact.sum(-1, keepdims=True)
    np.testing.assert_allclose(framework.numpy(weights), exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_block_is_not_rounded_to_the_dtype_of_its_inputs(framework, dtype):
    q, k, v = (framework.array(x, dtype) for x in np.random.default_rng(0).standard_normal((3, 1, 6, 2, 8)))
    out, lse = framework.compiled(framework.attend_block)(q, k, v)
    assert {str(x.dtype).removeprefix("torch.") for x in (out, lse)} == {"float32"}
    assert (out != framework.array(framework.array(out, dtype), "float32")).any()
