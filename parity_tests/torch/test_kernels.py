"""The Triton kernels without a GPU: in Triton's interpreter, on rings of real processes, every feature against float64.

A process of the pool reads TRITON_INTERPRET when it first imports Triton, and is told that its CPU is a GPU. Tiles are cut small,
so that short sequences have whole, partly seen and unseen ones.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from ring_attn_core import Gather, Ulysses, causal, sliding_window
from ring_attn_core.kernels import call as calls
from ring_attn_core.kernels.tile_sizes import TileConfig
from ring_attn_core.plan import global_order
from ring_attn_core.reference.oracle import Attention
from ring_attn_torch import CacheSizes, KVCache, prefill, ring_attention
from ring_attn_torch.attend import kernels as fused
from ring_attn_torch.call import prepare

from ..support.cases import MASKS, SPECIAL, Case, check, check_future_unseen, check_kept, one_hot
from ..support.combinations import COMBINATIONS, EVERYTHING, SINKS_ALONE, TREES, check_sinks_alone, with_nan_in_dlse
from ..support.large_scores import SIZES, check_exact, check_no_ring_adds_errors, large
from ..support.orders import BALANCED, BALANCED_RINGS, KERNEL_RINGS, ORDERED_KERNELS, check_bits
from ..support.selection import first, one_in
from ..support.spawn import Ranks
from ..support.strategies import EACH
from . import ring

pytest.importorskip("triton")


SMALL = {
    "forward": TileConfig(32, 16, 1, 1, tma=True),
    "delta": TileConfig(32, 0, 1, 1),
    "dq": TileConfig(16, 16, 1, 1, tma=True),
    "dkv": TileConfig(16, 32, 1, 1, tma=True),
}


STRATEGIC = [
    Case(strategy="direct", mask=sliding_window(5), ranks=3, heads=2, length=48, batch=1),
    Case(strategy="ulysses", ranks=2, heads=2, kv_heads=1, batch=1, dtype="float16", sinks=True),
    Case(strategy="gather", ranks=3, heads=2, kv_heads=1, batch=1, dtype="float16", key_mask="random"),
    Case(
        strategy=Gather(groups=2), ranks=2, batch=1, length=33, dtype="float16", key_mask="random", sinks=True, dropout_rate=0.3
    ),
    Case(strategy="two_way", ranks=3, heads=2, batch=1, dtype="float16"),
    *(replace(case, ranks=2, batch=1) for case in EACH),
    Case(strategy=Ulysses(ranks=2), heads=2, length=48, batch=1, extents="documents", alibi=True),
]


@contextmanager
def as_on_a_gpu():
    """Let the interpreter compute as a GPU: the least of a number and NaN is the number, and integers wrap.

    To look for integers that overflow took a third of the time; a quarter to look through the language that a module knows for
    every function that a kernel calls, not once a launch.
    """
    from triton.runtime import interpreter

    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    start, know, known = interpreter.GridExecutor.__call__, interpreter._patch_lang, []

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        known.clear()
        start(executor, *args, **kwargs)

    def know_once(function: Any) -> Any:
        if not any(function.__globals__ is one for one in known):
            known.append(function.__globals__)
            return know(function)

    with (
        patch.object(interpreter.InterpreterBuilder, "create_minnumf", lambda builder, a, b: builder.binary_op(a, b, np.fmin)),
        patch.object(interpreter.interpreter_builder, "options", options),
        patch.object(interpreter.GridExecutor, "__call__", launch),
        patch.object(interpreter, "_patch_lang", know_once),
    ):
        yield


def on_rank(group: Any, case: Case, *shards: np.ndarray) -> list[np.ndarray]:
    launched = []
    launch, gpu = fused.launch, lambda device: 80
    with (
        as_on_a_gpu(),
        patch.object(prepare, "capability", gpu),
        patch.object(calls, "choose_tiles", lambda kernel, *_: SMALL[kernel]),
        patch.object(global_order, "TILE", 32),
        patch.object(calls, "latent_tiles", lambda *_: SMALL["forward"]),
        patch.object(fused, "launch", lambda what, arrays: launched.append(what.kernel) or launch(what, arrays)),
    ):
        results = ring.on_rank(group, case, *shards)
    assert {"forward", "dq", "dkv"} <= {*launched} or case.dtype == "float64"
    return results


def run(pool: Ranks, case: Case) -> Attention:
    return ring.run_or_restart(pool, case, on_rank)


def on_few_ranks(cases: list[Case], most: int) -> list[Case]:
    """Small rings: the interpreter takes 10 ms a program. And no bfloat16, of which it multiplies the bits as integers.

    Every second case has one row of the batch.
    """
    halves = lambda dtype: "float16" if dtype == "bfloat16" else dtype
    few = [replace(case, ranks=min(case.ranks, most), dtype=halves(case.dtype)) for case in cases]
    return [replace(case, batch=2 - i % 2) for i, case in enumerate(few)]


@pytest.mark.parametrize("case", first(on_few_ranks(TREES, most=2), 2, 5), ids=str)
def test_key_extents_are_exact(interpreter, case):
    case = replace(case, heads=2, kv_heads=1)
    check(case, run(interpreter, replace(case, poison=True)))


@pytest.mark.parametrize("case", one_in(6, on_few_ranks(COMBINATIONS[::-1], most=2)), ids=str)
def test_any_two_features_together_are_exact(interpreter, case):
    check(case, run(interpreter, replace(case, poison=True)))


@pytest.mark.slow
@pytest.mark.parametrize("case", first([replace(case, ranks=2) for case in EVERYTHING], 1, 2), ids=str)
def test_every_feature_at_once_is_exact(interpreter, case):
    check(case, run(interpreter, case))


@pytest.mark.parametrize("case", one_in(2, on_few_ranks([case for case in SPECIAL if case.length < 100][::-1], most=2)), ids=str)
def test_special_cases_are_exact(interpreter, case):
    check(case, run(interpreter, case))


@pytest.mark.parametrize(("case", "rings"), first([(case, KERNEL_RINGS[: i or 1]) for i, case in enumerate(ORDERED_KERNELS)]))
def test_in_global_order_kernels_have_the_same_bits_on_every_ring(interpreter, case, rings):
    check_bits(replace(case, poison=True), partial(run, interpreter), rings)


@pytest.mark.exhaustive
def test_in_global_order_kernels_have_the_same_bits_in_balanced_layouts(interpreter):
    rings = [ring for ring in BALANCED_RINGS if ring["ranks"] <= 3]
    check_bits(replace(BALANCED, dtype="float16", heads=2, kv_heads=1), partial(run, interpreter), rings)


def prefilled(group: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> bool:
    """Return True if a cache prefilled in three chunks gives the bits of the whole sequence, on one rank."""
    whole = [torch.from_numpy(x) for x in (q, k, v)]
    options: dict[str, Any] = {"order": "global", "length": q.shape[1], "backend": "triton"}
    with (
        as_on_a_gpu(),
        patch.object(prepare, "capability", lambda device: 80),
        patch.object(calls, "choose_tiles", lambda kernel, *_: SMALL[kernel]),
        patch.object(global_order, "TILE", 32),
    ):
        expected = ring_attention(*whole, layout="contiguous", mask=causal(), group=group, **options)
        cache, outs = KVCache.make(CacheSizes(1, k.shape[2], k.shape[3]), len(q), q.shape[1], dtype="float32", group=group), []
        for first, last in ((0, 41), (41, 42), (42, q.shape[1])):
            step = cache.prefill_step(last - first, "contiguous")
            out, cache = prefill(*(x[:, first:last] for x in whole), cache, 0, step, **options)
            outs.append(out)
            cache.advance(step)
    return torch.equal(torch.cat(outs, 1), expected)


def test_prefill_in_global_order_has_the_bits_of_the_kernels(interpreter):
    q, k, v = (np.random.default_rng(0).standard_normal((2, 101, heads, 16), np.float32) for heads in (4, 2, 2))
    assert interpreter(1, prefilled, q, k, v) == [True]


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_equal_large_scores_are_as_exact_on_a_ring_as_on_one_rank(interpreter, size):
    cases = [large(size, ranks, heads=2, batch=1, length=61) for ranks in (1, 2)]  # log2 of 61 is rounded
    check_no_ring_adds_errors([check_exact(case, run(interpreter, case)) for case in cases], (1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("case", first(STRATEGIC, 2, 5), ids=str)
def test_joined_shards_are_exact_under_every_strategy(interpreter, case):
    """Gradients of keys that travel are in float32, in one step too."""
    check(case, run(interpreter, replace(case, poison=True)))


@pytest.mark.parametrize(("head_dim", "v_dim"), first([(192, 128), (5, 40), (16, 16), (48, 16), (300, 40)], 2))
def test_head_sizes_are_padded_inside_the_kernel(interpreter, head_dim, v_dim):
    case = Case(head_dim=head_dim, v_dim=v_dim, ranks=2, batch=1, heads=2, kv_heads=1)
    check(case, run(interpreter, case))


LATENT = [
    Case(head_dim=80, v_dim=64, dtype="float16", extents="documents", sinks=True),
    Case(head_dim=128, v_dim=64, strategy="gather", key_mask="random", dropout_rate=0.3),
    Case(head_dim=128, v_dim=64, dtype="float16", mask=sliding_window(9), alibi=True),
    Case(head_dim=100, v_dim=50, key_extents="any", softcap=2.0),
    Case("striped", head_dim=200, v_dim=100, dtype="float16"),
    Case(head_dim=24, v_dim=16, dtype="float16", key_mask="random"),
    Case("contiguous", head_dim=256, v_dim=40),
]
"""Cases of values in keys: tails of 16, 64 (by TMA), 50 and 100 columns, no tail, and one too wide for a tile."""


@pytest.mark.parametrize("case", first(LATENT, 2, 6), ids=str)
def test_values_that_are_columns_of_keys_are_exact(interpreter, case):
    case = replace(case, ranks=2, batch=1, heads=2, kv_heads=1, values_in_keys=True, poison=True)
    check(case, run(interpreter, case))


@pytest.mark.parametrize("layout", first(["striped", "contiguous", "zigzag"], 1, 2))
def test_dropout_keeps_the_set_of_the_truth(interpreter, layout):
    case = one_hot(Case(layout, MASKS["full"], ranks=2, length=56, v_dim=56, heads=2, dropout_rate=0.4))
    check_kept(case, run(interpreter, case).out)


def test_a_tile_that_lies_in_two_spans_of_the_key_mask_looks_at_both(interpreter):
    """Begin the second run of a shard at its key 72, while hidden keys are noted by spans of 64."""
    case = Case(mask=MASKS["full"], ranks=2, kv_length=288, batch=1, heads=1, kv_heads=1, key_mask="random")
    case = case.given(key_mask=np.arange(288)[None] < 272)
    check(case, run(interpreter, case))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_query_that_sees_nothing_but_its_sink_spoils_no_key(interpreter):
    """Sinks of float64, which no lse of float32 equals."""
    assert not SINKS_ALONE.visible.any(2).all()
    case = replace(SINKS_ALONE, poison=True).given(sinks=np.array([0.1, 0.3]))
    check(case, run(interpreter, case))


@pytest.mark.slow
def test_nan_in_dlse_of_a_query_that_sees_no_key_reaches_the_sinks_alone(interpreter):
    case = replace(SINKS_ALONE, extents=None, key_mask="none")
    check_sinks_alone(run(interpreter, case), run(interpreter, with_nan_in_dlse(case)))


@pytest.mark.exhaustive
def test_a_ring_of_three_hides_the_future(interpreter):
    case = Case(ranks=3, batch=1, heads=1, kv_heads=1)
    token = 23
    check_future_unseen(run(interpreter, case), run(interpreter, case.with_other_future(token)), token, case.length)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "uint32", "int64"])
def test_kernels_are_given_extents_of_any_integers_within_int32(dtype):
    """And not beyond 2**30, so that a stride added to an end in the kernels does not wrap."""
    high = min(np.iinfo(dtype).max, 2**40)
    extents = torch.tensor([[[3, high]]], dtype=getattr(torch, dtype))
    given = fused._clip(extents)
    assert given is fused._clip(extents), "all layers share one copy"
    assert given.dtype == torch.int32
    assert given.tolist() == [[[3, min(high, 2**30)]]]
