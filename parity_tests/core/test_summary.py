"""Tests of summary attention: visibility, pooling, the arrays that travel, and the oracle's own gradients."""

from __future__ import annotations

from math import ceil

import numpy as np
import pytest

from ring_attn_core.reference.summary import exact_summary, who_sees_what
from ring_attn_core.variants.summary import POOLINGS, SummaryOptions, SummaryPlan

from ..support.summaries import EXACT, MEAN, SummaryCase

SIZES = [(37, 4, 0), (37, 5, 7), (64, 16, 3), (5, 8, 0), (1, 1, 0), (61, 13, 60), (61, 1, 2), (40, 40, 0), (0, 3, 2)]


def plans(ranks: int) -> list[SummaryPlan]:
    made = []
    for length, block, window in SIZES:
        for pooling in POOLINGS:
            summaries = 1 if block % 2 else 2
            options = SummaryOptions(block=block, window=window, summaries=summaries, pooling=pooling, length=length)
            made += [SummaryPlan(options, ranks, ceil(length / ranks) + more) for more in (0, 3)]
    return made


@pytest.mark.parametrize(("length", "block", "window"), SIZES)
def test_every_earlier_token_is_represented_exactly_once(length, block, window):
    case = SummaryCase(1, block, window, 1, MEAN, length=length)
    seen, of = who_sees_what(length, case.asked)
    tokens, summaries = seen[:, :length], seen[:, length:]
    np.testing.assert_array_equal(tokens + summaries.astype(int) @ of, np.tri(length, dtype=int))
    for i in range(length):
        assert tokens[i, max(i - window, 0) : i + 1].all()
        assert tokens[i].sum() <= window + block


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_the_plan_is_the_definition(ranks):
    for plan in plans(ranks):
        seen, _ = who_sees_what(plan.length, SummaryCase(1, plan.options.block, plan.options.window, 1, MEAN).asked)
        first = [int(plan.first(i)) for i in range(plan.length)]
        assert first == [int(np.argmax(row)) for row in seen[:, : plan.length]]
        assert plan.blocks == (max(first) // plan.options.block if first else 0)
        reach = plan.exact_options.mask.hi
        assert reach is None or all(i - j <= reach for i, j in enumerate(first))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_every_summarized_token_is_pooled_by_the_rank_that_holds_it_and_by_no_other(ranks):
    """And every block finds the parts that its ranks have made."""
    for plan in plans(ranks):
        parts = {}
        for rank in range(ranks):
            for slot in range(plan.slots):
                for u in range(plan.options.summaries):
                    first, end = plan.pooled(slot, u, rank)
                    assert 0 <= first <= end <= plan.local
                    parts[rank * plan.slots + slot, u] = range(rank * plan.local + first, rank * plan.local + end)
        used = set()
        for n in range(plan.blocks):
            for u in range(plan.options.summaries):
                held = [plan.held(n, owner) for owner in range(plan.owners)]
                tokens = [token for place, exists in held if exists for token in parts[place, u]]
                begin = n * plan.options.block + u * plan.options.width * (plan.options.pooling == MEAN)
                assert tokens == list(range(begin, begin + plan.options.width))
                used |= {(place, u) for place, exists in held if exists}
        assert not [tokens for place, tokens in parts.items() if place not in used and tokens]


def test_only_summaries_travel_beyond_the_window():
    """1,048,576 tokens on 8 ranks, a window of 4,096, blocks of 64: a hundredth of what a ring sends."""
    plan = SummaryPlan(SummaryOptions(block=64, window=4096), 8, 2**17)
    sent = plan.bytes_sent(1, 8, (128, 128), 2)
    a_hop = 2**17 * 8 * 256 * 2
    assert plan.ring.hops == (1,)
    assert sent.forward == a_hop + 7 * 2048 * 8 * 257 * 4
    assert sent.backward == a_hop + 2 * a_hop * 2 + 7 * 2048 * 8 * 257 * 4
    nothing_far = SummaryPlan(SummaryOptions(block=64, window=2**20), 8, 2**17).bytes_sent(1, 8, (128, 128), 2)
    assert nothing_far.forward == 7 * a_hop


@pytest.mark.parametrize("name", ["q", "k", "v", "pool"])
@pytest.mark.parametrize(
    "case",
    [
        SummaryCase(1, block=5, length=19, dtype="float64", masked=True, softcap=2.0),
        SummaryCase(1, block=6, summaries=3, window=2, pooling=MEAN, length=19, dtype="float64"),
    ],
    ids=str,
)
def test_the_oracles_gradients_are_those_of_its_outputs(case: SummaryCase, name: str):
    """By differences in extended precision, along random directions."""
    if name not in case.arrays:
        return
    rng = np.random.default_rng(3)
    direction, step = rng.standard_normal(case.arrays[name].shape), 1e-5

    def objective(sign: int) -> float:
        other = case.given(**{name: case.arrays[name] + sign * step * direction})
        got, lse = exact_summary(*other.whole, other.asked)[:2]
        seen = np.isfinite(lse)
        return float((got * case.arrays["dout"]).sum() + (lse[seen] * case.arrays["dlse"][seen]).sum())

    gradient = float((getattr(case.expected, f"d{name}") * direction).sum())
    assert (objective(1) - objective(-1)) / (2 * step) == pytest.approx(gradient, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_the_oracle_is_exact_attention_where_every_token_is_represented(case):
    from ring_attn_core.masks import causal
    from ring_attn_core.reference.oracle import exact

    arrays = {name: case.arrays[name] for name in ("q", "k", "v", "dout", "dlse")}
    truth = exact(**arrays, mask=causal(), key_mask=case.arrays.get("key_mask"))
    for name in ("out", "lse", "dq", "dk", "dv"):
        np.testing.assert_allclose(getattr(case.expected, name), getattr(truth, name), rtol=1e-12, atol=1e-12, err_msg=name)
