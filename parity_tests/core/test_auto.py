"""The table of ``strategy="auto"``: each row once, at the sizes at which it begins, and which calls a row leaves to the next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.simulate.points import points
from ring_attn_core import sliding_window
from ring_attn_core.plan.balanced import balanced_layout
from ring_attn_core.problem.auto import RULES, choose
from ring_attn_core.problem.checks import OptionalArray
from ring_attn_core.problem.options import Options
from ring_attn_core.problem.problem import Problem

EXTENTS = OptionalArray("extents", (1, 8192, 2), "int32")
MEASURED = [point for point in points() if point.framework == "torch"]
PACKED = balanced_layout([900, 1200, 700, 5000, 64, 1340, 8192, 300, 4000, 2600, 8472], 4)
TRAVELS_NOT, PACKED_DIRECT, PACKED_RING, UNMEASURED, WINDOW, NO_REACH, SHORT, PUSH, REST = range(len(RULES))


def problem(tokens: int = 8192, kv_heads: int = 8, batch: int = 1, **fields: Any) -> Problem:
    """Return a causal call of 32 heads of 128 on four GPUs in PyTorch."""
    q, k = (batch, tokens, 32, 128), (batch, tokens, kv_heads, 128)
    call = {"dtypes": ("bfloat16",) * 3, "device": "cuda", "capability": 90, "framework": "torch", "ranks": 4} | fields
    return Problem(q, k, k, **call)  # type: ignore[arg-type]


def windowed(tokens: int, window: int, **fields: Any) -> Problem:
    return problem(tokens, options=Options(mask=sliding_window(window)), **fields)


def packed(**fields: Any) -> Problem:
    """Return a call with extents in the balanced layout of documents, all within these documents."""
    return problem(**{"arrays": (EXTENTS,), "within_documents": True, "options": Options(layout=PACKED)} | fields)


JAX: dict[str, Any] = {"framework": "jax", "device": "gpu"}
CPU: dict[str, Any] = {"device": "cpu", "capability": 0, "dtypes": ("float32",) * 3}


@pytest.mark.parametrize(
    ("call", "reach", "row"),
    [
        (windowed(8192, 0), True, TRAVELS_NOT),
        (packed(), True, PACKED_DIRECT),
        (packed(**CPU), False, PACKED_DIRECT),
        (packed(arrays=(), options=Options(layout=PACKED, mask=sliding_window(63))), False, PACKED_DIRECT),
        (packed(**JAX, arrays=(), options=Options(layout=PACKED, mask=sliding_window(63))), False, PACKED_DIRECT),
        (packed(within_documents=False), True, PACKED_RING),
        (packed(arrays=()), True, PACKED_RING),
        (packed(**JAX, within_documents=False), False, PACKED_RING),
        (packed(**JAX, arrays=(), traced_layout=True), False, PACKED_RING),
        (packed(options=Options(layout=PACKED, steps=(0, 1))), True, PACKED_RING),
        (problem(**CPU), True, UNMEASURED),
        (problem(dtypes=("float32",) * 3), True, UNMEASURED),
        (problem(options=Options(backend="cudnn")), True, UNMEASURED),
        (windowed(8192, 4096), False, WINDOW),
        (windowed(8192, 4096, **JAX), False, WINDOW),
        (windowed(32768, 4096), True, WINDOW),
        (windowed(16384, 4096), True, PUSH),
        (windowed(4096, 1024), False, NO_REACH),
        (windowed(32768, 32768), True, PUSH),
        (problem(), False, NO_REACH),
        (problem(2048), False, NO_REACH),
        (problem(**JAX), False, NO_REACH),
        (problem(2048), True, SHORT),
        (problem(2048, arrays=(EXTENTS,)), True, REST),
        (problem(2050), True, PUSH),
        (problem(2048, batch=2), True, PUSH),
        (problem(arrays=(EXTENTS,)), True, PUSH),
        (problem(32768), True, PUSH),
        (problem(32768, kv_heads=32), True, REST),
    ],
    ids=range(29),
)
def test_each_row_of_the_table_takes_its_calls(call: Problem, reach: bool, row: int):
    assert choose(call, reach) is RULES[row]


@pytest.mark.parametrize("name", sorted({(point.machine.name, point.call) for point in MEASURED}), ids="-".join)
def test_auto_was_measured_no_slower_than_the_ring_and_at_most_five_percent_slower_than_the_fastest(name):
    of_call = [point for point in MEASURED if (point.machine.name, point.call) == name]
    seconds, load = {point.strategy: point.measured.both for point in of_call}, of_call[0].load
    options = Options(layout=load.plan.layout, mask=load.plan.mask)
    taken = choose(problem(load.plan.seq_local, ranks=load.plan.ranks, options=options), True).strategy
    if taken not in seconds:
        pytest.skip(f"{taken} was not measured")
    assert seconds[taken] <= seconds["ring"]
    assert seconds[taken] < 1.05 * min(seconds.values())


def test_the_strategy_of_a_call_is_that_of_its_row_and_with_reach_that_of_another():
    call = problem()
    assert call.travel == call.strategy == "ring"
    assert call.reaching == problem(options=Options(strategy="push"))
    assert windowed(65536, 4096).reaching is packed().reaching is problem(ranks=1).reaching is None
    assert packed().travel == packed().strategy == "direct"


def test_a_strategy_that_is_named_is_not_replaced():
    call = problem(options=Options(strategy="gather"))
    assert call.travel == call.strategy == "gather" and call.reaching is None


def test_extents_within_the_documents_matter_only_where_direct_is_the_choice_then():
    unknown = packed(within_documents=False)
    assert unknown.travel == "ring" and unknown.within == packed() and packed().strategy == "direct"
    assert packed().within is packed(arrays=()).within is packed(options=Options(layout=PACKED, strategy="ring")).within is None
    assert unknown.fingerprint() == packed().fingerprint()  # or ranks with other extents would disagree


@pytest.mark.parametrize("found", ["within", "reaching"])
def test_a_call_that_does_not_fit_is_refused_before_the_table_is_read(found: str):
    with pytest.raises(ValueError, match="q must have 4 dimensions"):
        getattr(replace(packed(within_documents=False), q_shape=(1, 8192, 128)), found)
