"""Tests of memory: attention's own beside its inputs and outputs, and the cost of one more rank to the others."""

from __future__ import annotations

import pytest

from benchmarks.memory.cell import FRAMEWORKS, MOST, RANKS, peak_ratio, shard_bytes, temp_bytes

SEQ_LOCAL = 512


@pytest.fixture(autouse=True)
def programs_as_users_compile_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_peak_memory_is_the_arrays_and_little_more(framework: str):
    """Under a window: the arrays of the real thing and little of its arithmetic."""
    pytest.importorskip(framework)
    assert peak_ratio(framework, 65_536, "sliding_window:2047") <= MOST


@pytest.mark.full
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_peak_memory_is_the_arrays_and_little_more_causal(framework: str):
    pytest.importorskip(framework)
    assert peak_ratio(framework, 65_536) <= MOST


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_forward_ring_needs_no_more_memory_with_more_ranks():
    pytest.importorskip("jax")
    of_two, of_four, of_eight = (row["forward"] for row in temp_bytes(RANKS, SEQ_LOCAL, in_order=True))
    assert of_eight - of_four <= 0.05 * shard_bytes(SEQ_LOCAL)
    # With jax 0.12 a third step needs one shard more, for what arrives while another leaves: with two ranks nothing is passed on.
    assert of_four - of_two <= 1.05 * shard_bytes(SEQ_LOCAL)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_slices_straight_from_their_owner_need_no_more_memory_with_more_ranks():
    pytest.importorskip("jax")
    of_four, of_eight = temp_bytes((4, 8), SEQ_LOCAL, in_order=True, strategy="direct")
    for key in ("forward", "both"):
        assert of_eight[key] - of_four[key] <= 0.05 * shard_bytes(SEQ_LOCAL)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_ways_need_no_more_memory_with_more_ranks():
    """From four ranks on: with two there is one way only."""
    pytest.importorskip("jax")
    of_four, of_eight = temp_bytes((4, 8), SEQ_LOCAL, in_order=True, strategy="two_way")
    assert of_eight["forward"] - of_four["forward"] <= 0.05 * shard_bytes(SEQ_LOCAL)
    # With four ranks one way ends after one hop, so nothing arrives on it while another shard leaves.
    assert of_eight["both"] - of_four["both"] <= 1.05 * shard_bytes(SEQ_LOCAL)
