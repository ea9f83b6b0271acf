"""Tests of the places of a growing sequence's tokens: the arithmetic against one token at a time, and refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_attn_core.cache import checks
from ring_attn_core.cache.host_state import HostState
from ring_attn_core.cache.placement import append_indices, count_held, earlier, owners, place, positions
from ring_attn_core.cache.spec import CacheSizes, CacheSpec
from ring_attn_core.layouts import LAYOUTS, padded_local
from ring_attn_core.model.config import TransformerConfig

SIZES = CacheSizes(2, 2, 8)
QUICK = settings(derandomize=True, deadline=None, max_examples=100)
COUNTS = st.lists(st.integers(0, 12), min_size=1, max_size=8)


@QUICK
@given(COUNTS, st.integers(0, 40))
def test_tokens_leave_ranks_as_even_as_they_can(counts, tokens):
    """No rank that got one has two more than another, and who has more than that had them before."""
    after = [count + place(counts, tokens).count(rank) for rank, count in enumerate(counts)]
    assert sum(after) == sum(counts) + tokens
    assert all(now == before or now <= min(after) + 1 for before, now in zip(counts, after, strict=True))


@QUICK
@given(COUNTS, st.integers(1, 20))
def test_the_arithmetic_places_every_token_where_one_at_a_time_goes(counts, tokens):
    levels = np.array(counts)[None, :, None] + np.arange(tokens)
    turn = append_indices(np.array(counts)[None], levels, np.array(earlier(len(counts))))[0]
    placed = {int(turn[rank, i]): (rank, counts[rank] + i) for rank in range(len(counts)) for i in range(tokens)}
    used = list(counts)
    for token, rank in enumerate(place(counts, tokens)):
        assert placed[token] == (rank, used[rank])
        used[rank] += 1
    assert len(np.unique(turn)) == turn.size


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_chunk_stays_where_the_layout_has_it(layout, ranks):
    for length in (1, 7, 30):
        local = padded_local(layout, ranks, length)
        shards = positions(layout, ranks, local)
        assert sorted(p for shard in shards for p in shard) == list(range(ranks * local))
        assert all(shard == sorted(shard) for shard in shards)
        assert [rank for p in range(ranks * local) for rank in range(ranks) if p in shards[rank]] == owners(layout, ranks, local)
        for real in range(length + 1):
            assert [[p for p in shard if p < real] for shard in shards] == [
                shard[:n] for shard, n in zip(shards, count_held(layout, ranks, local, real), strict=True)
            ]


def test_a_shard_that_the_layout_cannot_cut_is_refused():
    with pytest.raises(ValueError, match=r"needs an even number of tokens a rank, got 3: .* pads to 4 a rank"):
        positions("zigzag", 2, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": None}, "capacity must be an int of at least 1, got None"),
        ({"room": 3}, "room=3 goes with window"),
        ({"window": 5, "room": 3, "capacity": 7}, r"capacity=7 cannot hold window \+ room = 5 \+ 3: .* pass at least 8, or None"),
        ({"window": 5, "page": 4}, "what a window sees does not grow"),
        ({"window": 0}, "window must be an int of at least 1, got 0"),
        ({"dtype": "int8"}, "dtype must be one of bfloat16, .*, got 'int8'"),
        ({"scaled": True}, "k_scale and v_scale go with dtype='float8_e4m3fn', and this cache has float32"),
        ({"config": "llama"}, "made for a TransformerConfig or CacheSizes.*, got 'llama'"),
        ({"batch": 0}, "batch must be an int of at least 1, got 0"),
        ({"page": 1.5}, "page must be an int of at least 1, got 1.5"),
    ],
)
def test_a_cache_that_cannot_be_is_refused(arguments, message):
    given = {"config": SIZES, "batch": 2, "capacity": 9, "ranks": 2, "dtype": "float32"} | arguments
    with pytest.raises(ValueError, match=message):
        CacheSpec.of(**given)


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_new_keys_have_a_dtype_that_the_cache_takes(dtype):
    spec = CacheSpec.of(SIZES, 2, 9, 2, dtype=dtype)
    shapes = [(2, 3, spec.sizes.kv_heads, spec.sizes.head_dim)] * 2
    taken = {"float32": ("float32",), "float8_e4m3fn": ("bfloat16", "float16", "float32", "float64")}[dtype]
    for new in (
        "bfloat16",
        "float16",
        "float32",
        "float64",
        "float8_e4m3fn",
        "float8_e5m2",
        "int8",
        "int32",
        "bool",
        "complex64",
    ):
        if new in taken:
            checks.check_new(spec, (2, 3), shapes, (new, new))
        else:
            with pytest.raises(
                ValueError, match=f"k and v are {new}, and a cache of {dtype} takes {', '.join(taken)}: cast them"
            ):
                checks.check_new(spec, (2, 3), shapes, (new, new))


def test_a_cache_without_a_dtype_has_that_in_which_the_model_computes():
    config = TransformerConfig(vocab=10, dim=32, depth=3, heads=4)
    kept, computed = replace(config, param_dtype="float64"), replace(config, compute_dtype="float16")
    dtypes = [CacheSpec.of(each, 2, 9, 2, dtype=None).dtype for each in (SIZES, config, kept, computed)]
    assert dtypes == ["bfloat16", "float32", "float64", "float16"]


def test_capacity_is_that_of_all_ranks_and_with_a_window_of_each():
    fixed = CacheSpec.of(SIZES, 2, 9, 2, dtype="float32")
    paged = CacheSpec.of(SIZES, 2, 9, 2, dtype="float32", page=4)
    window = CacheSpec.of(SIZES, 2, None, 2, dtype="float32", window=5, room=3)
    assert (fixed.slots, fixed.capacity, fixed.remembered) == (6, 12, 12)
    assert (paged.slots, checks.grown(paged, [[4, 3], [8, 0]], 3).slots) == (8, 12)
    assert (window.slots, window.capacity, window.remembered) == (8, None, 3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_a_prompt_of_the_capacity_fits_in_every_layout(layout: str, ranks: int):
    for capacity in range(1, 41):
        slots = CacheSpec.of(SIZES, 1, capacity, ranks, dtype="float32").slots
        assert slots <= -(-capacity // ranks) + 1
        local = padded_local(layout, ranks, capacity)
        assert all(max(count_held(layout, ranks, local, length)) <= slots for length in range(capacity + 1))


def test_a_full_cache_says_what_to_do():
    fixed, paged = (CacheSpec.of(SIZES, 2, 8, 2, dtype="float32", page=page) for page in (None, 4))
    checks.check_full(fixed, 6, 2, 0)
    with pytest.raises(ValueError, match=r"request 1 has 7 tokens, and 2 more exceed the capacity of 8 \(4 on each of 2 ranks\)"):
        checks.check_full(fixed, 7, 2, 1)
    with pytest.raises(ValueError, match="reserve more"):
        checks.check_full(paged, 7, 2, 1)
    words = "rank 1 has 2 of its 4 slots of request 0 in use, and holds 3 tokens of this chunk"
    with pytest.raises(ValueError, match=f"{words}: make it with capacity=10, or"):
        checks.check_shards(fixed, (0, 2), (3, 3), 0)
    with pytest.raises(ValueError, match=rf"{words}: reserve\(6\), or"):
        checks.check_shards(paged, (0, 2), (3, 3), 0)
    assert min(checks.grown(paged, [[0, 2]], 6).slots, CacheSpec.of(SIZES, 2, 10, 2, dtype="float32").slots) >= 5
    with pytest.raises(ValueError, match="fixed capacity"):
        checks.grown(fixed, [[0, 0]], 1)


def test_the_host_knows_bounds_between_steps_and_all_after_it_asked():
    host_state = HostState(CacheSpec.of(SIZES, 2, 20, 2, dtype="float32"))
    assert host_state.empty
    host_state.prefilled([0, 1], [[3, 2], [1, 0]])
    assert host_state.counts == [[3, 2], [1, 0]] and host_state.lengths == [5, 1]
    host_state.appended([0, 1], 4)
    assert host_state.counts is None and host_state.lengths == [9, 5]
    host_state.know([[4, 4], [1, 1]], [9, 2])
    host_state.fork([0], [1])
    assert host_state.counts == [[4, 4], [4, 4]] and host_state.reached == [9, 9]
    host_state.cut([6, 9])
    assert host_state.lengths == [6, 8] and host_state.counts is None and host_state.reached == [9, 9]
    host_state.reset([1])
    assert host_state.lengths == [6, 0]
