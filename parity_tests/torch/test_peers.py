"""The strategy "push" over a stand-in for GPU memory: exact, the same bits at every run, and never stuck."""

# pyright: reportArgumentType=false

from __future__ import annotations

import random
import time
import weakref
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ring_attn_core import causal, full, sliding_window
from ring_attn_core.problem.traffic import traffic
from ring_attn_torch import ring_attention
from ring_attn_torch.ring import peers
from ring_attn_torch.ring.peer_access import Reach, Renumbered, check_access
from ring_attn_torch.ring.strategies import push

from ..support.cases import Case, check
from ..support.combinations import COMBINATIONS, EVERYTHING
from ..support.peers import Mapped, mapped
from ..support.selection import first
from ..support.spawn import PerRank
from ..support.strategies import problem_of
from .ring import check_late_ranks, late, on_rank, run

CASES = [
    *EVERYTHING,
    *COMBINATIONS[::3],
    Case("contiguous", sliding_window(9), 4, length=61, kv_heads=1),
    Case("zigzag", sliding_window(2), 8, length=70, key_mask="shard"),
    Case("striped", full(), 3, length=37, kv_length=50, dtype="bfloat16"),
    Case("contiguous", causal(), 8, length=61, key_extents="any", dropout_rate=0.3),
]


def over_files(group: Any, case: Case, *shards: Any) -> Any:
    with mapped():
        return on_rank(group, case, *shards)


@pytest.mark.parametrize("case", first(CASES, 3, 9), ids=str)
def test_push_is_exact_with_every_feature(gloo, case):
    check(case, run(gloo, replace(case, strategy="push"), over_files))


@pytest.mark.parametrize(("ranks", "delays"), first([(3, 2), (8, 2), (2, 100), (4, 100)], 1, 2, "campaign"))
def test_ranks_that_start_at_random_delays_give_the_same_bits(gloo, ranks, delays):
    case = Case(strategy="push", ranks=ranks, sinks=True, kv_heads=1)
    check(case, check_late_ranks(gloo, case, delays, delayed, over_files))


def delayed(seed: int, group: Any, case: Case, *shards: Any) -> Any:
    """``over_files``, with a random delay before each flag that a rank raises or awaits."""
    draw = random.Random(1000 * seed + dist.get_rank(group))
    replaced: dict[str, Any] = {name: late(getattr(Mapped, name), draw, 0.004) for name in ("raise_flag", "await_flag")}
    with patch.multiple(Mapped, **replaced):
        return over_files(group, case, *shards)


def test_calls_in_a_row_do_not_mix_their_keys(gloo):
    assert gloo(4, in_a_row) == [True] * 4


def in_a_row(group: Any) -> bool:
    """Return whether forwards one after the other, each with other keys, have the ring's bits, with one slow rank at a time."""
    draws = [torch.randn(3, 1, 8, 2, 4, generator=torch.Generator().manual_seed(i * 4 + dist.get_rank(group))) for i in range(4)]
    expected = [ring_attention(*draw, group=group, strategy="ring") for draw in draws]
    slow, await_flag = iter(range(100)), Mapped.await_flag

    def late(self: Mapped, *arguments: Any, **keywords: Any) -> None:
        time.sleep(0.02 if next(slow) // 4 % 4 == self.rank else 0)
        await_flag(self, *arguments, **keywords)

    with mapped(), patch.object(Mapped, "await_flag", late):
        found = [ring_attention(*draw, group=group, strategy="push") for draw in draws]
    return all(map(torch.equal, found, expected))


def test_calls_of_other_sizes_share_the_buffers(gloo):
    small, large = (Case(strategy="push", ranks=4, length=length) for length in (37, 150))
    for case in (small, large, small, large):
        check(case, run(gloo, case, over_files))


@pytest.mark.parametrize("case", EVERYTHING[:2], ids=str)
def test_bytes_copied_between_ranks_are_the_plans(gloo, case):
    case = replace(case, strategy="push")
    counted = gloo(case.ranks, count, case, *(PerRank(*x) for x in case.inputs()))
    assert counted == [sum(each.bytes for each in traffic(problem_of(case, "torch")))] * case.ranks


def count(group: Any, case: Case, *shards: Any) -> int:
    """Return the bytes that this rank copies from or to other ranks in a forward and a backward."""
    remote, view = [], Mapped._view

    def counted(self: Mapped, rank: int, begin: int, like: torch.Tensor) -> torch.Tensor:
        remote.append(like.numel() * like.element_size() * (rank != self.rank))
        return view(self, rank, begin, like)

    with patch.object(Mapped, "_view", counted):
        over_files(group, case, *shards)
    return sum(remote)


def test_a_call_in_inference_mode_leaves_buffers_that_training_can_use(gloo):
    assert gloo(2, inferred_and_trained) == [True] * 2


def inferred_and_trained(group: Any) -> bool:
    q = torch.randn(1, 7, 2, 8, requires_grad=True)
    attend = partial(ring_attention, q, q, q, group=group, layout="contiguous")
    with mapped():
        peers.free(group)
        with torch.inference_mode():
            out = attend(strategy="push")
        trained = attend(strategy="push")
        trained.sum().backward()
        with torch.inference_mode():
            again = attend(strategy="push")
    return torch.equal(out, trained) and torch.equal(out, again)


def test_a_call_on_cpus_is_refused_the_same_on_every_rank(gloo):
    words = gloo(2, refused)
    assert "copies between the memory of GPUs" in words[0]
    assert words[0] == words[1]


def refused(group: Any) -> str:
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match="push") as error:
        ring_attention(q, q, q, group=group, strategy="push")
    return str(error.value)


def test_memory_is_freed_and_a_call_that_ended_in_the_middle_is_the_last(gloo):
    assert gloo(2, freed_and_broken) == [(True, "make a new group")] * 2


def freed_and_broken(group: Any) -> tuple[bool, str]:
    """Return whether ``free`` lets go of the buffers, and the end of the error of a call after one that failed in a step."""
    q = torch.ones(1, 4, 2, 8)
    attend = partial(ring_attention, q, q, q, group=group, strategy="push")
    with mapped():
        attend()
        buffers = weakref.ref(peers._made[group])
        peers.free(group)
        gone = buffers() is None
        with patch.object(push.PushPass, "arrived", side_effect=KeyError), pytest.raises(KeyError):
            attend()
        with pytest.raises(RuntimeError) as error:
            attend()
        peers.free(group)
    return gone, str(error.value)[-16:]


def test_only_ranks_that_signal_to_this_one_are_called_late(gloo):
    assert gloo(4, called_late) == [([], sorted({(rank - 1) % 4, (rank + 1) % 4})) for rank in range(4)]


def called_late(group: Any) -> tuple[list[int], list[int]]:
    """Return who is late for a pass of a window that all ranks have begun, and for the next one."""
    q = torch.ones(1, 4, 2, 8)
    with mapped(), patch.object(Mapped, "read_flags", lambda self: self._flags(self.rank).tolist()):
        ring_attention(q, q, q, group=group, strategy="push", layout="contiguous", mask=sliding_window(3))
        dist.barrier(group)
        made = peers._made[group]
        late = made.late(made.number), made.late(made.number + 1)
        peers.free(group)
    return late


@pytest.mark.parametrize("second", [["b", "2"], ["a", "2", 1, ["2"], ["1", "3"]]], ids=["hosts", "access"])
def test_gpus_that_cannot_reach_each_other_are_refused(second):
    ranks = [Reach("a", "1"), Reach(*second)]
    with pytest.raises(ValueError, match="rank 1"):
        check_access(ranks)


def test_a_rendezvous_comes_off_if_some_ranks_have_met_in_a_smaller_group_before(gloo):
    assert gloo(3, met_after_others) == [[[0, 1, 2]] * 2] * 3


def met_after_others(group: Any) -> list[list[int]]:
    """Return what two exchanges of torch's rendezvous gather, whose numbers are those of the process: rank 1 has had 7 before."""
    renumbered = Renumbered(group, timedelta(seconds=60))
    store = dist.PrefixStore("", renumbered)  # type: ignore[attr-defined]  # through C++, as torch calls it
    had = 7 if dist.get_rank(group) == 1 else 0
    return [gathered(store, group, number) for number in (had, had + 1)]


def gathered(store: Any, group: Any, number: int) -> list[int]:
    keys = [f"CUDASymmetricMemory/{number}/{rank}" for rank in range(dist.get_world_size(group))]
    store.set(keys[dist.get_rank(group)], str(dist.get_rank(group)))
    store.wait(keys)
    return [int(store.get(key)) for key in keys]


def test_a_rank_that_does_not_come_to_a_rendezvous_is_named(gloo):
    said = gloo(2, waits_in_vain)[0]
    assert "rank 0 lost the ring while it waited for rank 1, to map its memory" in said


def waits_in_vain(group: Any) -> str:
    store = Renumbered(group, timedelta(seconds=1))
    if dist.get_rank(group):
        return ""
    with pytest.raises(RuntimeError) as failed:
        store.wait(["CUDASymmetricMemory/0/1"])
    return str(failed.value)
