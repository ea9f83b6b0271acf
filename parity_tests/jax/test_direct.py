"""The strategy "direct" of JAX where slices are parts of shards: exact, and the bytes that a window costs."""

from __future__ import annotations

from functools import partial

import pytest

from ring_attn_core import LAYOUTS
from ring_attn_core.problem.traffic import traffic
from ring_attn_jax import sharded_ring_attention

from ..support.selection import first
from ..support.strategies import SLICED, of_a_window, problem_of
from .ring import hops_tied_to_steps, mesh_of
from .test_strategies import arrays, gradients, traced_bytes


@pytest.mark.parametrize("layout", first(sorted(LAYOUTS, reverse=True)))
@pytest.mark.parametrize(("window", "local"), [(4096, 65_536)])
def test_a_window_of_4096_at_65536_tokens_a_rank_costs_what_the_plan_says(layout, window, local):
    case = of_a_window(layout, window, local)
    number = 4 * (case.head_dim + case.v_dim)  # bytes of a key and its value, or of their gradients
    for rank, counted in enumerate(traced_bytes(case)):
        forward, backward = traffic(problem_of(case, "jax"), rank)
        assert counted == forward.bytes + backward.bytes
        if layout == "contiguous":
            assert counted == ((rank < 3) * 2 + (rank > 0)) * window * number
        if layout == "zigzag":
            assert counted == (3 if rank in (0, 3) else 6) * window * number


@pytest.mark.exhaustive
def test_neighboring_keys_that_make_slices_equally_long_are_counted():
    more = 0
    for case in SLICED:
        for rank, counted in enumerate(traced_bytes(case)):
            ours, theirs = (sum(x.bytes for x in traffic(problem_of(case, name), rank)) for name in ("jax", "torch"))
            assert counted == ours >= theirs
            more += ours > theirs
    assert more


def test_each_step_waits_for_the_slices_of_the_next():
    """Each barrier ties a step to the next slices and to this rank's own keys, from which the slices after these are cut."""
    ring = partial(sharded_ring_attention, mesh=mesh_of(8), layout="striped", strategy="direct")
    text = gradients(ring).lower(*arrays()).as_text()
    hops_tied_to_steps(text, others=2)
