"""The choice of ``strategy="auto"``: what it takes with which record, what it leaves out, and the reason that it gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.simulate.points import HOST_BOUND, HOST_IN_STEPS
from ring_attn_core import TwoLevel, Ulysses, sliding_window
from ring_attn_core.plan.balanced import balanced_layout
from ring_attn_core.plan.machine import H100, H200, NOISE
from ring_attn_core.problem.auto import GAIN, JOINED_GAIN
from ring_attn_core.problem.checks import OptionalArray
from ring_attn_core.problem.options import Options
from ring_attn_core.problem.problem import Problem

BALANCED = balanced_layout([8192] * 4, 4)
EXTENTS = OptionalArray("extents", (1, 8192, 2), "int32")


def problem(tokens: int = 8192, ranks: int = 8, host_ranks: int = 8, heads: int = 32, **fields: Any) -> Problem:
    """Return a call with 8 key heads of 128 on H200s."""
    q, k = (1, tokens, heads, 128), (1, tokens, min(heads, 8), 128)
    options = {"dtypes": ("bfloat16",) * 3, "device": "cuda", "machine": H200, "framework": "torch"} | fields
    return Problem(q, k, k, ranks=ranks, host_ranks=host_ranks, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "taken"),
    [
        (problem(), "two_way"),
        (problem(tokens=2048), "gather"),
        (problem(tokens=2048, heads=6), "gather"),
        (problem(tokens=65536, options=Options(mask=sliding_window(4096))), "direct"),
        (problem(tokens=2048, ranks=64), Ulysses(ranks=8)),
        (problem(arrays=(EXTENTS,)), "two_way"),
        (problem(machine=None), "ring"),
        (problem(host_ranks=0), "ring"),
        (problem(dtypes=("float32",) * 3), "ring"),
        (problem(options=Options(backend="cudnn")), "ring"),
        (problem(options=Options(mask=sliding_window(0))), "ring"),
    ],
    ids=range(11),
)
def test_auto_says_what_it_takes_and_why(call, taken):
    call.check()
    assert call.travel == taken
    assert "ring" in call.choice.why or "nothing travels" in call.choice.why
    assert call.fingerprint()["strategy"] == "auto"


@pytest.mark.parametrize(
    ("fields", "taken"),
    [
        ({}, True),
        ({"tokens": 32768}, True),
        ({"arrays": (EXTENTS,)}, True),
        ({"machine": replace(H100, peer=0.0)}, False),
        ({"peer_access": False}, False),
        ({"host_ranks": 2}, False),
        ({"host_ranks": 0}, False),
        ({"dtypes": ("float32",) * 3}, False),
        ({"options": Options(backend="flash")}, False),
        ({"options": Options(mask=sliding_window(0))}, False),
        ({"options": Options(layout=BALANCED)}, False),
        ({"machine": replace(H100, memory=1e9)}, False),
        ({"machine": replace(H100, host_push_backward=1.0, host_pull_backward=1.0)}, False),
    ],
    ids=range(13),
)
def test_auto_takes_push_on_one_host_of_h100s_only_if_it_was_measured_and_can_run_the_call(fields, taken):
    call = problem(**{"ranks": 4, "host_ranks": 4, "machine": H100, "peer_access": True} | fields)
    call.check()
    assert (call.travel == "push") == taken
    assert ("copy engines" in call.choice.why) == taken
    assert all(each.both < float("inf") for each in call.choice.predicted.values())  # what was not measured is not predicted


def test_auto_with_a_noisy_record_is_the_ring_and_says_what_to_do():
    quiet, noisy = (problem(machine=replace(H200, noise=noise)) for noise in (NOISE, 0.45))
    assert quiet.travel == "two_way"
    assert (noisy.travel, noisy.choice.predicted) == ("ring", {})
    assert "measurements of NVIDIA H200 differ by 45%" in noisy.choice.why
    assert "run ring-attn doctor --measure again" in noisy.choice.why


def test_auto_joins_shards_only_for_a_gain_that_covers_their_unmeasured_kernels():
    short = problem(tokens=2048, ranks=2, host_ranks=2, machine=HOST_BOUND)
    assert short.travel == "gather"  # predicted 20 % faster than the ring, measured 15 %
    long = problem(tokens=32768, ranks=2, host_ranks=2, machine=HOST_IN_STEPS)
    times = {name: each.both for name, each in long.choice.predicted.items()}
    assert min(times, key=lambda name: times[name]) == "gather"
    assert GAIN < times["ring"] / times["gather"] < JOINED_GAIN
    assert long.travel == "ring"  # a gather was measured to take 7 % longer


PACKED = balanced_layout([900, 1200, 700, 5000, 64, 1340, 8192, 300, 4000, 2600, 8472], 4)


def packed(**fields: Any) -> Problem:
    """Return a call of four H200s with extents in the balanced layout of documents, all within these documents."""
    call = {"arrays": (EXTENTS,), "within_documents": True, "options": Options(layout=PACKED)} | fields
    return problem(tokens=8192, ranks=4, host_ranks=4, **call)


@pytest.mark.parametrize(
    ("call", "taken", "why"),
    [
        (packed(), "direct", "where the ring takes"),
        (packed(machine=None), "direct", "direct: the busiest rank receives or sends 44% of the keys that a ring brings it"),
        (packed(machine=None, device="cpu", dtypes=("float32",) * 3), "direct", "44% of the keys"),
        (packed(machine=replace(H200, noise=1.0)), "direct", "44% of the keys"),
        (packed(machine=replace(H200, memory=1e8)), "ring", "no strategy that can run this"),
        (packed(machine=replace(H200, host_copy=1.0)), "ring", "no strategy that can run this"),
        (packed(within_documents=False), "ring", "not known that extents stay within the documents"),
        (packed(arrays=()), "ring", "the busiest rank receives or sends 100% of the keys that a ring brings it"),
        (packed(arrays=(), options=Options(layout=PACKED, mask=sliding_window(63))), "direct", "sends 1% of the keys"),
        (packed(options=Options(layout=BALANCED)), "direct", "sends 0% of the keys"),
        (packed(framework="jax", within_documents=False), "ring", "not known that extents stay within the documents"),
        (packed(framework="jax", arrays=(), options=Options(layout=PACKED, mask=sliding_window(63))), "direct", "of the keys"),
        (packed(framework="jax", arrays=(), traced_layout=True), "ring", "not known"),
        (packed(options=Options(layout=PACKED, steps=(0, 1))), "ring", "not known"),
    ],
    ids=range(14),
)
def test_auto_takes_direct_in_a_balanced_layout_if_few_keys_travel(call, taken, why):
    assert call.travel == call.strategy == taken
    assert why in call.choice.why


def test_extents_within_the_documents_matter_only_where_direct_is_the_choice_then():
    unknown = packed(within_documents=False)
    assert unknown.travel == "ring" and unknown.within == packed() and packed().strategy == "direct"
    assert packed().within is packed(arrays=()).within is packed(options=Options(layout=PACKED, strategy="ring")).within is None
    assert unknown.fingerprint() == packed().fingerprint()  # or ranks with other extents would disagree


def test_a_call_that_does_not_fit_is_refused_before_the_documents_matter():
    with pytest.raises(ValueError, match="q must have 4 dimensions"):
        _ = replace(packed(within_documents=False), q_shape=(1, 8192, 128)).within


def test_auto_takes_no_strategy_that_a_call_refuses():
    predicted = problem(tokens=2048, heads=6).choice.predicted
    assert "ulysses" not in predicted
    assert "gather" not in problem(tokens=2048, arrays=(EXTENTS,)).choice.predicted
    across = problem(ranks=64).choice.predicted
    assert {str(Ulysses(ranks=8)), str(TwoLevel(ranks=8))} < across.keys()
    assert "gather" not in problem(tokens=65536).choice.predicted  # 14 GiB beside the ring's keys


def test_a_strategy_that_is_named_is_not_replaced():
    call = problem(tokens=2048, options=Options(strategy="ring"))
    assert call.travel == call.strategy == "ring"
