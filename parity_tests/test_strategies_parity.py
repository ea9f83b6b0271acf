"""JAX = PyTorch under every strategy, gradients included: float32 to 1e-6, norm of the difference over norm."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

from .core.test_order import LAYOUTS, plan_of
from .support.balanced import DIRECT_CASES
from .support.selection import first
from .support.strategies import EACH, ONE_EACH, PAIRS, SHARED
from .test_parity import agree

CASES = [replace(case, dtype="float32") for case in (*ONE_EACH, *SHARED, *EACH, *PAIRS)]


@pytest.mark.parametrize("case", first(dict.fromkeys(CASES), 0, 6), ids=str)
def test_frameworks_agree_under_every_strategy(gloo, case, record_property):
    record_property("worst", agree(gloo, case))


@pytest.mark.parametrize("case", first([case for case in DIRECT_CASES if case.dtype == "float32"], 0, 1), ids=str)
def test_frameworks_agree_on_needed_keys(gloo, case, record_property):
    record_property("worst", agree(gloo, case))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels_of_both_frameworks_compute_the_same_tiles_in_global_order(layout):
    import jax.numpy as jnp
    import torch

    from ring_attn_jax.ring.strategies import global_order as in_jax
    from ring_attn_torch.ring.strategies import global_order as in_torch

    plan = plan_of(layout, 3)
    for own, slot in ((plan.own_queries, plan.q_slot), (plan.own_keys, plan.k_slot)):
        assert own is not None
        for rank in range(3):
            ours, theirs = in_jax._tiles(own, jnp.int32(rank), slot), in_torch._tiles(own, rank, slot, torch.device("cpu"))
            order, places = theirs.order.numpy(), theirs.places.numpy()
            np.testing.assert_array_equal(np.minimum(ours.order, slot - 1), order)
            np.testing.assert_array_equal(ours.rows, np.array(theirs.rows))
            for _, n, start, _ in own.runs[rank]:
                held = np.arange(start, start + n)
                np.testing.assert_array_equal(order[places[held]], held)
                np.testing.assert_array_equal(order[np.asarray(ours.places)[held]], held)
