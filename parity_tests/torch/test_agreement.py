"""Tests of one wrong rank: all ranks raise the same error, none hangs, and the ring works again afterwards."""

# pyright: reportArgumentType=false

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist

from ring_attn_core import LAYOUTS, causal, full, sliding_window
from ring_attn_torch import ring_attention
from ring_attn_torch.call import decide
from ring_attn_torch.ring import agreement
from ring_attn_torch.ring.groups import store_of

RANKS = 4


def shards(tokens=6, heads=4, kv_heads=2, dim=8, dtype=torch.float32, v_dim=None):
    make = lambda h, d: torch.ones(1, tokens, h, d, dtype=dtype)
    return {"q": make(heads, dim), "k": make(kv_heads, dim), "v": make(kv_heads, v_dim or dim)}


WRONG: dict[str, Any] = {
    "disagree on q_shape": (lambda n: shards(n + 2), "disagree on q_shape: .*rank 2.*to_layout"),
    "disagree on dtypes": (lambda n: shards(n, dtype=torch.bfloat16), "disagree on dtypes: .*float32.*bfloat16.*on rank 2"),
    "disagree on layout": (
        lambda n: shards(n) | {"layout": "striped"},
        "disagree on layout: 'zigzag' on rank 0, 'striped' on rank 2",
    ),
    "disagree on mask": (lambda n: shards(n) | {"mask": full()}, "disagree on mask"),
    "disagree on length": (lambda n: shards(n) | {"length": 4 * n - 1}, "disagree on length"),
    "disagree on scale": (lambda n: shards(n) | {"scale": 0.5}, "disagree on scale: .*Pass the same on every rank$"),
    "heads do not divide": (
        lambda n: shards(n, kv_heads=3),
        "rank 2: q has 4 heads and k has 3: kv heads must divide query heads",
    ),
    "odd zigzag": (lambda n: shards(n + 1), r"rank 2: zigzag over 4 ranks needs an even number .* got \d+ .*to_layout"),
    "integers": (lambda n: shards(n, dtype=torch.int32), "rank 2: .*must be one of bfloat16.*int32"),
    "mixed dtypes": (lambda n: shards(n) | {"v": shards(n, dtype=torch.float16)["v"]}, "rank 2: q, k and v must have one dtype"),
    "no tensor": (lambda n: shards(n) | {"k": [1.0]}, "rank 2: k must be a torch.Tensor, got list"),
    "a sparse tensor": (lambda n: shards(n) | {"k": torch.ones(1, n, 2, 8).to_sparse()}, "rank 2: k is sparse or nested"),
    "three dimensions": (lambda n: shards(n) | {"q": torch.ones(n, 4, 8)}, "rank 2: q must have 4 dimensions"),
    "k and v differ": (lambda n: shards(n) | {"v": torch.ones(1, n - 2, 2, 8)}, "rank 2: k and v must agree"),
    "head_dim differs": (lambda n: shards(n) | {"q": torch.ones(1, n, 4, 9)}, "rank 2: q has head_dim 9 and k has 8"),
    "batch differs": (lambda n: shards(n) | {"q": torch.ones(2, n, 4, 8)}, "rank 2: q has batch 2 and k has batch 1"),
    "unknown layout": (lambda n: shards(n) | {"layout": "spiral"}, "rank 2: unknown layout 'spiral': choose one of contiguous"),
    "unknown backend": (lambda n: shards(n) | {"backend": "abacus"}, "rank 2: unknown backend 'abacus'"),
    "no mask": (lambda n: shards(n) | {"mask": "causal"}, "rank 2: mask must be full"),
    "too long": (lambda n: shards(n) | {"length": 4 * n + 1}, "rank 2: length=.* is more than the 4 shards of q hold"),
    "keys too long": (lambda n: shards(n) | {"kv_length": 4 * n + 1}, "rank 2: kv_length=.* is more than the 4 shards of k hold"),
    "bad scale": (lambda n: shards(n) | {"scale": float("nan")}, "rank 2: scale must be a finite"),
    "disagree on softcap": (lambda n: shards(n) | {"softcap": 2.0}, "disagree on softcap: None on rank 0, 2.0 on rank 2"),
    "disagree on sinks": (lambda n: shards(n) | {"sinks": torch.ones(4)}, "disagree on arrays"),
    "bad softcap": (lambda n: shards(n) | {"softcap": 0.0}, "rank 2: softcap must be a Python number above 0"),
    "dropout without a seed": (lambda n: shards(n) | {"dropout_rate": 0.5}, "rank 2: dropout_rate=0.5 needs dropout_seed"),
    "too much dropout": (lambda n: shards(n) | {"dropout_rate": 1.0, "dropout_seed": 0}, "rank 2: dropout_rate is the share"),
    "a seed that is none": (
        lambda n: shards(n) | {"dropout_rate": 0.1, "dropout_seed": 0.5},
        "rank 2: dropout_seed must be an int",
    ),
    "an offset that is none": (
        lambda n: shards(n) | {"dropout_rate": 0.1, "dropout_seed": 1, "dropout_offset": 3},
        "rank 2: dropout_offset is a pair",
    ),
    "an additive mask": (
        lambda n: shards(n) | {"key_mask": torch.zeros(1, n)},
        "rank 2: key_mask must have dtype bool, .*mask == 0",
    ),
    "a mask for queries": (lambda n: shards(n) | {"key_mask": torch.ones(1, n, n).bool()}, "rank 2: key_mask must be .*extents"),
    "reversed extents": (
        lambda n: shards(n) | {"extents": torch.tensor([4, 3], dtype=torch.int32).expand(1, n, 2)},
        "rank 2: extents must be 0 <= first <= end",
    ),
    "an array for a seed": (
        lambda n: shards(n) | {"dropout_rate": 0.1, "dropout_seed": torch.tensor([1])},
        "rank 2: dropout_seed must be an int or a 0-d integer tensor",
    ),
    "a bool for a seed": (
        lambda n: shards(n) | {"dropout_rate": 0.1, "dropout_seed": False},
        "rank 2: .* integer tensor, got False",
    ),
    "too wide a seed": (lambda n: shards(n) | {"dropout_rate": 0.1, "dropout_seed": 2**63}, "rank 2: dropout_seed must fit"),
    "a negative offset": (
        lambda n: shards(n) | {"dropout_rate": 0.1, "dropout_seed": 1, "dropout_offset": (0, -1)},
        "rank 2: dropout_offset holds the global index of the first head",
    ),
    "disagree on dropout_offset": (
        lambda n: shards(n) | {"dropout_rate": 0.1, "dropout_seed": 1, "dropout_offset": (0, 4)},
        r"disagree on dropout_offset: \[0, 0\] on rank 0, \[0, 4\] on rank 2",
    ),
    "sinks of key heads": (lambda n: shards(n) | {"sinks": torch.ones(2)}, r"rank 2: sinks must be \[heads\] = \[4\]"),
    "slopes to be learned": (
        lambda n: shards(n) | {"alibi_slopes": torch.ones(4, requires_grad=True)},
        "rank 2: alibi_slopes are constants.*detach",
    ),
    "a side beyond int64": (lambda n: shards(n) | {"mask": sliding_window(2**63)}, "rank 2: mask.hi counts tokens"),
    "wrong device": (lambda n: {n: x.to("meta") for n, x in shards(n).items()}, "rank 2: .*backend serves cpu"),
}


@pytest.mark.pairs
@pytest.mark.parametrize("when", ["on the first call", "on a later call"])
@pytest.mark.parametrize("problem", WRONG)
def test_all_ranks_raise_the_same_value_error(gloo, problem, when):
    wrong, message = WRONG[problem]
    gloo.refuse(message, RANKS, call, 2, problem, when == "on a later call")
    assert all(out is not None for out in gloo(RANKS, call, None, problem, False)), "the ring works again"


def call(group, wrong_rank, problem, after_a_good_one):
    forget(group)
    if after_a_good_one:
        ring_attention(**shards(), group=group)
    tokens = 10 if after_a_good_one else 6
    right = shards(tokens)
    if problem == "disagree on dropout_offset":
        right |= {"dropout_rate": 0.1, "dropout_seed": 1}
    return ring_attention(**(WRONG[problem][0](tokens) if dist.get_rank() == wrong_rank else right), group=group).shape


def forget(group):
    """As if no problem had been seen on this group."""
    if group in agreement._histories:
        agreement._histories[group].agreed.clear()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.uint32], ids=str)
def test_wrong_extents_are_found_at_every_call(gloo, dtype):
    words = r"rank 1: extents must be 0 <= first <= end <= kv_length = 24, got \[9, 3\]"
    gloo.refuse(words, RANKS, wrong_at_the_second_call, dtype)


def wrong_at_the_second_call(group, dtype):
    right, wrong = (torch.tensor([[span] * 6], dtype=torch.int64).to(dtype) for span in ([0, 24], [9, 3]))
    ring_attention(**shards(), group=group, extents=right)
    return ring_attention(**shards(), group=group, extents=wrong if dist.get_rank() == 1 else right)


@pytest.mark.parametrize("kind", [ValueError, NotImplementedError])
def test_an_objection_is_raised_everywhere_as_what_it_was(kind):
    heard: list[Any] = [{"error": kind.__name__, "message": f"of rank {rank}"} for rank in range(2)]
    with pytest.raises(kind, match=r"^rank 0: of rank 0$"):
        agreement._conclude(heard)
    with (
        pytest.raises(kind, match=r"^rank 0: of rank 0$") as raised,
        patch.multiple(agreement, ranks_of=lambda group: 2, history_of=MagicMock(), _exchange=lambda *_: heard),
        agreement.same_error(MagicMock()),
    ):
        raise kind("of rank 1")
    assert str(raised.value.__cause__) == "of rank 1"


def test_the_lowest_rank_speaks_when_several_are_wrong(gloo):
    gloo.refuse(f"^rank 1: unknown layout 'one': choose one of {', '.join(LAYOUTS)}$", RANKS, two_wrong)


def two_wrong(group):
    forget(group)
    name = {1: "one", 3: "three"}.get(dist.get_rank(), "zigzag")
    return ring_attention(**shards(), group=group, layout=name)


@pytest.mark.exhaustive
def test_all_ranks_say_the_same_where_the_lowest_comes_late(gloo):
    gloo.refuse(f"^rank 0: unknown layout 'spiral': choose one of {', '.join(LAYOUTS)}$", 2, all_wrong_and_the_first_late)


def all_wrong_and_the_first_late(group):
    forget(group)
    time.sleep(1.0 * (dist.get_rank() == 0))
    return ring_attention(**shards(), group=group, layout="spiral")


@pytest.mark.parametrize("differentiated", [False, True], ids=["forward", "and backward"])
def test_a_first_call_makes_one_exchange_and_a_repeated_one_none(gloo, differentiated):
    assert gloo(RANKS, exchanges, differentiated) == [[1, 1, 2]] * RANKS


def exchanges(group, differentiated):
    """Return how many exchanges the ranks have made after a call, after an equal one, and after another."""
    forget(group)
    counts = []
    with patch.object(agreement, "_exchange", wraps=agreement._exchange) as made:
        for scale in (0.123, 0.123, 0.5):
            inputs = {name: x.requires_grad_(differentiated) for name, x in shards().items()}
            out = ring_attention(**inputs, group=group, scale=scale)
            if differentiated:
                out.sum().backward()
            counts.append(made.call_count)
    return counts


def test_repeated_offsets_ask_no_rank_and_those_on_the_device_are_not_compared(gloo):
    gloo(2, offsets)


def offsets(group):
    dropout = {"dropout_rate": 0.1, "dropout_seed": 1, "group": group}
    ring_attention(**shards(), **dropout, dropout_offset=(8, 0))
    ring_attention(**shards(), **dropout, dropout_offset=(0, torch.tensor(dist.get_rank())))
    with patch.object(agreement, "_exchange", side_effect=AssertionError("asked")):
        ring_attention(**shards(), **dropout, dropout_offset=(8, 0))


def test_a_ring_of_one_needs_no_torch_distributed():
    with pytest.raises(ValueError, match="kv heads must divide query heads"):
        ring_attention(**shards(kv_heads=3))
    assert ring_attention(**shards(), mask=causal(offset=1)).shape == (1, 6, 4, 8)


@pytest.mark.parametrize(("before", "after"), [(-1, 0), (0, -1)])
def test_a_window_below_zero_is_refused_when_it_is_made(before, after):
    with pytest.raises(ValueError, match="before >= 0 and after >= 0"):
        sliding_window(before, after)


def test_an_invalid_group_is_refused():
    with pytest.raises(ValueError, match="group must be a ProcessGroup"):
        ring_attention(**shards(), group="everyone")


def test_a_group_of_a_destroyed_groups_name_starts_afresh(gloo):
    assert gloo(2, in_two_lives) == [[(1, 4, 4, 8), (1, 6, 4, 8)]] * 2


def in_two_lives(group):
    """Check that a group's entries in the store do not speak for the next group there, even of the same name."""
    shapes = []
    for tokens in (4, 6):
        agreement._histories.pop(group, None)
        time.sleep(0.2 * dist.get_rank())
        shapes.append(tuple(ring_attention(**shards(tokens), group=group).shape))
    return shapes


def test_a_rank_that_comes_after_the_others_gave_up_is_told_so(gloo):
    results = gloo.outcomes(2, one_comes_late)
    assert "rank 1 did not come" in str(results[0])
    assert "came too late: rank 0" in str(results[1])


def one_comes_late(group):
    forget(group)
    store = store_of(group)
    if dist.get_rank():
        store.wait(["the first gave up"])
    try:
        soon = lambda *_: timedelta(seconds=1)
        with patch.object(decide, "timeout", soon), patch.object(agreement, "timeout", soon):  # known from another file or not
            return ring_attention(**shards(), group=group)
    finally:
        store.set("the first gave up", "yes")


def test_calls_leave_no_keys_in_the_store(gloo):
    """With extents on a CPU every call asks the others; a rank keeps what it told them last, and what they may still read."""
    assert all(left <= 2 * 2 for left in gloo(2, keys_after_many_calls))


def keys_after_many_calls(group):
    extents = torch.tensor([[[0, 12]] * 6])
    store = store_of(group)
    ring_attention(**shards(), group=group, extents=extents)
    before = store.num_keys()
    for _ in range(20):
        ring_attention(**shards(), group=group, extents=extents)
    return store.num_keys() - before
