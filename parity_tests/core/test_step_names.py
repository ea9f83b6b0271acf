"""The name of a step says its number, and how many bytes of keys came from which rank."""

from __future__ import annotations

import pytest

from ring_attn_core import causal, sliding_window
from ring_attn_core.plan.balanced import balanced_layout
from ring_attn_core.plan.direct import DirectPlan
from ring_attn_core.plan.joined import JoinedPlan
from ring_attn_core.plan.needed import NeededPlan
from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.plan.step_names import in_units, step_name
from ring_attn_core.plan.two_level import TwoLevelPlan

SHARD = 32 << 20


@pytest.mark.parametrize(("shift", "owner"), [(1, 1), (2, 0), (3, 3)])
def test_a_step_names_the_owner_of_its_keys(shift: int, owner: int):
    plan = RingPlan("zigzag", causal(), 4, 64)
    assert step_name(plan, shift + 1, shift, SHARD, rank=2) == f"ring step {shift + 1} of 4, 32 MiB from rank {owner}"
    before = "1 rank" if shift == 1 else f"{shift} ranks"
    assert step_name(plan, shift + 1, shift, SHARD) == f"ring step {shift + 1} of 4, 32 MiB from {before} before"
    assert step_name(plan, 1, 0, SHARD, rank=2) == "ring step 1 of 4, own keys"


def test_a_step_on_joined_shards_names_their_owners():
    plan = JoinedPlan("zigzag", causal(), 8, 64, q_shards=2, k_shards=2)
    assert step_name(plan, 1, 0, SHARD, rank=5) == "ring step 1 of 4, 32 MiB of 2 ranks"
    assert step_name(plan, 2, 2, SHARD, rank=1) == "ring step 2 of 4, 32 MiB from ranks 6 to 7"


def test_a_step_of_direct_counts_its_slices_only():
    plan = DirectPlan("contiguous", sliding_window(16), 4, 64)
    assert step_name(plan, 2, 1, SHARD, rank=3) == "ring step 2 of 2, 8 MiB from rank 2"
    assert step_name(plan, 2, 1, SHARD, rank=0) == "ring step 2 of 2, 0 bytes from rank 3"
    assert step_name(plan, 2, 1, SHARD) == "ring step 2 of 2, 8 MiB from 1 rank before"


@pytest.mark.parametrize(("documents", "keys"), [((40, 24), "32 MiB of own and received keys"), ((32, 32), "own keys")], ids=str)
def test_the_step_of_direct_in_a_balanced_layout_counts_own_and_received_keys(documents, keys):
    plan = NeededPlan(balanced_layout(documents, 2), causal(), 2, 32, by_documents=True)
    assert step_name(plan, 1, 0, SHARD, rank=1) == f"ring step 1 of 1, {keys}"


def test_a_step_on_two_levels_names_the_owner_or_how_many_hosts_and_places_away_it_is():
    plan = TwoLevelPlan("zigzag", causal(), 8, 64, host_ranks=4)
    assert step_name(plan, 6, plan.shift(0, 1, 1), SHARD, rank=0) == "ring step 6 of 8, 32 MiB from rank 7"
    assert step_name(plan, 6, 5, SHARD) == "ring step 6 of 8, 32 MiB from 1 host and 1 place before"


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1 KiB"), (1536, "1.5 KiB"), (3 << 30, "3 GiB"), (5 << 41, "1.024e+04 GiB")],
)
def test_bytes_have_a_unit(size: int, words: str):
    assert in_units(size) == words


def test_a_symbolic_number_of_bytes_stays_symbolic():
    class Symbol:
        def __str__(self) -> str:
            return "512*b"

    assert in_units(Symbol()) == "512*b bytes"  # type: ignore[arg-type]  # jax.export's number
