"""Tests of the checks of a call: each message says what was expected, what came and what to do."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ring_attn_core import LAYOUTS, Band, RingPlan, Run, causal, full
from ring_attn_core.kernels import backends
from ring_attn_core.kernels.backends import BACKENDS, Candidate, select
from ring_attn_core.problem.checks import DTYPES, OptionalArray, check_extents, check_key_extents, check_runs
from ring_attn_core.problem.options import Options
from ring_attn_core.problem.problem import Problem

GOOD = Problem(
    q_shape=(2, 16, 8, 64),
    k_shape=(2, 12, 2, 64),
    v_shape=(2, 12, 2, 32),
    dtypes=("bfloat16", "bfloat16", "bfloat16"),
    device="cpu",
    ranks=4,
    options=Options(length=63),
)
FULL = replace(
    GOOD,
    options=Options(length=63, softcap=30.0, dropout_rate=0.1),
    arrays=(
        OptionalArray("extents", (2, 16, 2), "int32"),
        OptionalArray("key_mask", (2, 12), "bool"),
        OptionalArray("key_extents", (2, 12, 2), "int32"),
        OptionalArray("sinks", (8,), "float32"),
        OptionalArray("alibi_slopes", (8,), "bfloat16"),
        OptionalArray("dropout_seed", (), "int64"),
    ),
)


def changed(problem: Problem, **changes: Any) -> Problem:
    """The problem with other values, of the options too."""
    of_options = {name: changes.pop(name) for name in vars(problem.options) if name in changes}
    return replace(problem, **changes, options=replace(problem.options, **of_options))


def given(name: str, shape: tuple[int, ...], dtype: str) -> dict[str, Any]:
    return {"arrays": (OptionalArray(name, shape, dtype),)}


@pytest.mark.parametrize("problem", [GOOD, FULL], ids=["plain", "every feature"])
def test_a_problem_without_a_mistake_gives_its_plan(problem: Problem):
    assert problem.check() == RingPlan("zigzag", causal(), ranks=4, seq_local=16, kv_local=12, length=63, kv_length=48)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [None, 0.125, 1, 0, -2.0])
def test_every_dtype_and_finite_scale_is_taken(dtype: str, scale: float | None):
    changed(GOOD, dtypes=(dtype,) * 3, scale=scale).check()


ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"q_shape": (2, 16, 64)}, "q must have 4 dimensions [batch, seq_local, heads, head_dim], got shape [2, 16, 64]"),
    ({"k_shape": (2, 12)}, "k must have 4 dimensions [batch, kv_local, kv_heads, head_dim], got shape [2, 12]"),
    ({"v_shape": ()}, "v must have 4 dimensions [batch, kv_local, kv_heads, v_dim], got shape []"),
    (
        {"v_shape": (2, 14, 2, 64)},
        "k and v must agree in batch, kv_local and kv_heads, got k [2, 12, 2, 64] and v [2, 14, 2, 64]; "
        "only the last dimension may differ",
    ),
    (
        {"v_shape": (2, 12, 4, 64)},
        "k and v must agree in batch, kv_local and kv_heads, got k [2, 12, 2, 64] and v [2, 12, 4, 64]; "
        "only the last dimension may differ",
    ),
    ({"q_shape": (3, 16, 8, 64)}, "q has batch 3 and k has batch 2: pass the same batch rows to both"),
    (
        {"q_shape": (2, 16, 8, 128)},
        "q has head_dim 128 and k has 64: they are multiplied, so they must be equal (v's may differ)",
    ),
    (
        {"q_shape": (2, 16, 7, 64)},
        "q has 7 heads and k has 2: kv heads must divide query heads. For multi-query attention pass 1 kv head.",
    ),
    ({"q_shape": (2, 16, 0, 64)}, "heads must be at least 1, got 0"),
    ({"k_shape": (2, 12, 0, 64), "v_shape": (2, 12, 0, 64)}, "kv_heads must be at least 1, got 0"),
    ({"v_shape": (2, 12, 2, 0)}, "v_dim must be at least 1, got 0"),
    (
        {"dtypes": ("bfloat16", "float32", "bfloat16")},
        "q, k and v must have one dtype, got bfloat16, float32, bfloat16: cast them to the same",
    ),
    ({"dtypes": ("int8",) * 3}, "q, k and v must be one of bfloat16, float16, float32, float64, got int8: cast them first"),
    *(
        ({"scale": scale}, f"scale must be a finite Python number of at most 1e+18, or None (head_dim ** -0.5), got {scale!r}")
        for scale in (float("nan"), "0.1", 1e300, -1e19, 10**400)
    ),
    *(
        ({"mask": Band(hi=side)}, f"mask.hi must be int or None, a count of tokens (static under jit), got {side!r}")
        for side in ("a", 1.5, True)
    ),
    *(
        ({name: count}, f"{name} counts tokens, got {count}: to see everything on a side, leave it open as causal() does")
        for name, count in (("length", 2**62), ("kv_length", 2**62), ("length", -(2**62)))
    ),
    ({"deterministic": 1}, "deterministic must be True or False, got 1"),
    *(
        (
            {"softcap": cap},
            f"softcap must be a Python number above 0 (1e-18 to 1e+30), got {cap!r}: scores become softcap * "
            "tanh(score / softcap); pass None to leave them",
        )
        for cap in (0, -1.0, float("inf"), 1e31, 1e-19, 10**400, True, "30")
    ),
    *(
        (
            {"dropout_rate": rate},
            f"dropout_rate is the share of probabilities that are dropped, a Python number from 0 to below 1, got {rate!r}",
        )
        for rate in (1, -0.1, float("nan"), "0.1", None)
    ),
    (
        {"dropout_rate": 0.5},
        "dropout_rate=0.5 needs dropout_seed, an integer that is the same on every rank and another at every step",
    ),
    (
        given("extents", (2, 16), "int32"),
        "extents must be [batch, tokens of q, 2] = [2, 16, 2], got shape [2, 16]. It holds first and end (exclusive) of the key "
        "positions that each query may see, sharded like q",
    ),
    (
        given("extents", (2, 16, 2), "float32"),
        "extents must have an integer dtype, got float32. It holds first and end (exclusive) of the key positions that each "
        "query may see, sharded like q",
    ),
    *(
        (
            given("key_mask", shape, dtype),
            f"key_mask must {fault}. It says which keys may be attended, True or False, sharded like k: of a mask of 0 and 1 "
            "pass mask != 0, of an additive one mask == 0; what differs between queries belongs into mask or extents",
        )
        for shape, dtype, fault in (
            ((2, 12), "float32", "have dtype bool, got float32"),
            ((2, 12), "int64", "have dtype bool, got int64"),
            ((2, 1, 1, 12), "bool", "be [batch, tokens of k] = [2, 12], got shape [2, 1, 1, 12]"),
            ((2, 16), "bool", "be [batch, tokens of k] = [2, 12], got shape [2, 16]"),
        )
    ),
    (given("sinks", (2,), "float32"), "sinks must be [heads] = [8], got shape [2]. It holds one logit for every query head"),
    (given("sinks", (8,), "int32"), "sinks must have a floating dtype, got int32. It holds one logit for every query head"),
    (
        given("alibi_slopes", (2, 8), "float32"),
        "alibi_slopes must be [heads] = [8], got shape [2, 8]. It holds one slope for every query head",
    ),
    ({"layout": "spiral"}, f"unknown layout 'spiral': choose one of {', '.join(LAYOUTS)}"),
    (
        {"length": 65},
        "length=65 is more than the 4 shards of q hold (16 tokens each, 64 in all): "
        "pass every rank a shard of at least 18 tokens",
    ),
]


@pytest.mark.parametrize(("change", "message"), ERRORS, ids=[str(change) for change, _ in ERRORS])
def test_a_mistake_is_answered_with_what_was_expected_what_came_and_what_to_do(change: dict[str, Any], message: str):
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the whole message is compared
        changed(GOOD, **change).check()
    assert str(error.value) == message


def test_a_problem_scales_by_the_head_dim_of_its_keys_not_of_its_values():
    assert GOOD.scale == 64**-0.5
    assert changed(GOOD, scale=2).scale == 2


def test_ranks_agree_on_what_a_call_means_not_on_how_it_was_written():
    meant = changed(GOOD, scale=64**-0.5, length=63, kv_length=48).fingerprint()
    assert meant == GOOD.fingerprint() == replace(GOOD, within_documents=True).fingerprint()


@pytest.mark.parametrize(("name", "shape"), [("extents", (2, 16, 2)), ("key_extents", (2, 12, 2)), ("key_mask", (2, 12))])
def test_each_array_that_can_hide_every_key_of_a_query_is_known(name: str, shape: tuple[int, ...]):
    whole = changed(GOOD, length=None, mask=full())
    assert not whole.blanks
    assert replace(whole, **given(name, shape, "bool" if name == "key_mask" else "int32")).blanks
    assert not replace(whole, **given("sinks", (8,), "float32")).blanks


def test_the_fingerprint_tells_problems_apart_and_survives_json():
    def carried(problem: Problem) -> str:
        return json.dumps(problem.fingerprint(), sort_keys=True)

    assert carried(GOOD) == carried(replace(GOOD))
    for change in (
        {"length": 62},
        {"mask": causal(1)},
        {"dtypes": ("float16",) * 3},
        {"scale": 0.5},
        {"layout": "striped"},
        {"softcap": 1.0},
    ):
        assert carried(GOOD) != carried(changed(GOOD, **change))


@pytest.mark.parametrize(
    "extents",
    [
        pytest.param([[0, 48], [5, 5], [0, 0], [47, 48]], id="within"),
        pytest.param([[0, 48], [0, 48], [0, 48], [-9, 99]], id="wrong at padding only"),
    ],
)
def test_extents_within_the_keys_pass_whatever_stands_at_padding(extents: list[list[int]]):
    plan = RingPlan("contiguous", causal(), ranks=2, seq_local=4, kv_local=24, length=7)
    check_extents(np.array([extents]), plan.q_runs[1], plan.kv_length)


@pytest.mark.parametrize("wrong", [[-1, 4], [5, 4], [0, 49]], ids=["below 0", "reversed", "beyond the keys"])
def test_extents_that_are_wrong_are_named_with_the_position_of_their_query(wrong: list[int]):
    plan = RingPlan("striped", causal(), ranks=2, seq_local=4, kv_local=24)
    extents = np.array([[[0, 48]] * 4, [[0, 48], [1, 3], wrong, wrong]])
    with pytest.raises(
        ValueError, match=r"extents must be 0 <= first <= end <= kv_length = 48, got \[.*at position 5 of batch row 1"
    ):
        check_extents(extents, plan.q_runs[1], plan.kv_length)


@pytest.mark.parametrize("wrong", [[-1, 4], [5, 4], [0, 9]], ids=["below 0", "reversed", "beyond the queries"])
def test_key_extents_that_are_wrong_are_named_with_the_position_of_their_key(wrong: list[int]):
    plan = RingPlan("striped", causal(), ranks=2, seq_local=4, kv_local=24)
    key_extents = np.array([[[0, 8]] * 24, [[0, 8], [1, 3], wrong, wrong] + [[0, 0]] * 20])
    with pytest.raises(
        ValueError, match=r"key_extents must be 0 <= first <= end <= length = 8, got \[.*key at position 5 of batch"
    ):
        check_key_extents(key_extents, plan.k_runs[1], plan.length)


def test_runs_begin_at_the_start_where_none_are_given():
    assert check_runs(None, Run(5, 2), (1, 4, 1, 8), (1, 3, 1, 8)) == (Run(0, 4), Run(5, 2))


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ((range(3), None), r"q_run must be a Run\(start, length, stride\) or None, got range"),
        ((None, Run(0, 4)), "k_run has 4 tokens, and the block holds 3: pad the block, or shorten the run"),
        ((Run(-1, 2), None), "q_run starts at position -1: positions count from 0"),
        ((Run(2.5, 2), None), "the start of q_run must be an int, got 2.5"),
        ((Run(np.array([1]), 2), None), r"the start of q_run must be an int, got array\(\[1\]\)"),
        ((None, Run(0, np.array([1, 2]))), "the length of k_run must be an int, got array"),
        ((None, Run(0, True)), "the length of k_run must be an int, got True"),
        ((Run(2**30, 1), None), "q_run starts at position 1073741824: positions .* below"),
        ((Run(2**30 - 1, 2), None), "q_run ends at position 1073741824: positions .* below"),
        ((None, Run(0, np.int64(-3))), "k_run has -3 tokens"),
        ((Run(np.int64(-1), 2), None), "q_run starts at position -1"),
        ((Run(2**31, 2), None), "q_run starts at position 2147483648: positions .* below"),
        ((Run(7, 2, 2**30), Run(0, 1, 2**30)), "q_run ends at position 1073741831: positions .* below"),
        ((Run(0, 2, 0), None), "the stride of q_run must be an int of at least 1, got 0"),
        ((Run(0, 2, 2), None), "q_run has stride 2 and k_run 1: a block needs equal strides"),
    ],
)
def test_runs_that_do_not_fit_their_block_are_refused(runs: Any, message: str):
    with pytest.raises(ValueError, match=message):
        check_runs(*runs, (1, 4, 1, 8), (1, 3, 1, 8))


def backends_of(monkeypatch: pytest.MonkeyPatch, **objections: str | None) -> None:
    candidates = (Candidate(name, lambda problem, reason=reason: reason) for name, reason in objections.items())
    monkeypatch.setattr(backends, "BACKENDS", tuple(candidates))


def test_some_backend_solves_every_good_problem():
    assert select(GOOD) in [backend.name for backend in BACKENDS]
    assert select(GOOD, "blockwise") == "blockwise"


def test_auto_takes_the_first_backend_without_an_objection(monkeypatch: pytest.MonkeyPatch):
    backends_of(monkeypatch, fast="needs sm_90", middle=None, slow=None)
    assert select(GOOD) == "middle"
    assert select(GOOD, "slow") == "slow"


def test_a_backend_asked_for_by_name_gives_its_own_reason(monkeypatch: pytest.MonkeyPatch):
    backends_of(monkeypatch, fast="needs sm_90", slow=None)
    with pytest.raises(ValueError, match=r"backend='fast' cannot run this: needs sm_90. backend=.auto. takes 'slow'$"):
        select(GOOD, "fast")


def test_auto_lists_every_reason_where_all_object(monkeypatch: pytest.MonkeyPatch):
    backends_of(monkeypatch, fast="needs sm_90", slow="is off")
    with pytest.raises(ValueError, match=r"backend='auto' cannot run this: fast: needs sm_90; slow: is off$"):
        select(GOOD)


def test_an_unknown_backend_is_refused_with_the_names_there_are(monkeypatch: pytest.MonkeyPatch):
    backends_of(monkeypatch, fast=None, slow=None)
    with pytest.raises(ValueError, match=r"unknown backend 'flash': choose .auto. or one of fast, slow$"):
        select(GOOD, "flash")
