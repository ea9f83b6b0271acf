"""Tests of the ring's messages: the number of hops, their bytes and receivers, and sub-groups that keep to themselves."""

# pyright: reportArgumentType=false

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ring_attn_core import LAYOUTS, sliding_window
from ring_attn_core.reference.oracle import Attention
from ring_attn_torch import ring_attention
from ring_attn_torch.attend.blockwise import Blockwise
from ring_attn_torch.ring.strategies import ring as strategy
from ring_attn_torch.ring.transfer import send

from ..support.cases import MASKS, Case, check
from ..support.spawn import PerRank
from .ring import on_rank, options

WINDOWS = {**MASKS, "hopless": sliding_window(0), "skips the middle": sliding_window(3, offset=-40)}


@pytest.mark.pairs
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("mask", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_hops_and_bytes_are_the_plans(gloo, layout, mask, ranks):
    case = Case(layout, mask, ranks=ranks, length=61, dtype="bfloat16")
    plan = case.plan
    packed = case.batch * plan.kv_local * case.kv_heads * (case.head_dim + case.v_dim)
    k_v = [(hop, 2 * packed) for hop in plan.hops]
    gradients = [(hop, 4 * packed) for hop in (*plan.hops, plan.home) if hop]
    for forward, backward in gloo(ranks, count_sends, case, *(PerRank(*x) for x in case.inputs())):
        assert forward == k_v
        assert sorted(backward) == sorted(k_v + gradients)


def test_a_whole_ring_makes_one_hop_fewer_than_ranks_forward_and_ranks_hops_of_gradients(gloo):
    case = Case("striped", ranks=8, length=64)
    forward, backward = gloo(8, count_sends, case, *(PerRank(*x) for x in case.inputs()))[0]
    assert len(forward) == 7
    assert len(backward) == 7 + 8


def count_sends(group, case, *shards):
    """(hop, bytes) of every transfer of a forward and of a backward pass on this rank."""
    sent: list[tuple[int, int]] = []
    send = strategy.send

    def counting(x, hop, group):
        if hop:
            sent.append((hop, sum(a.numel() * a.element_size() for a in x if a is not None)))
        return send(x, hop, group)

    with patch.object(strategy, "send", counting), patch.object(dist, "barrier", side_effect=AssertionError("a barrier")):
        q, k, v = (torch.from_numpy(x).bfloat16().requires_grad_() for x in shards[:3])
        features = dict(zip(case.features, map(torch.from_numpy, shards[5:]), strict=True))
        out = ring_attention(q, k, v, group=group, **options(case.plan), **features)
        forward = list(sent)
        sent.clear()
        out.backward(torch.ones_like(out))
    return forward, sent


def test_one_batched_send_and_receive_a_hop_posted_before_the_step_computes(gloo):
    case = Case("contiguous", MASKS["full"], ranks=3, length=48)
    expected = ["hop", "attend", "hop", "attend", "attend"]
    for events in gloo(3, trace_events, case, *(PerRank(*x) for x in case.inputs())):
        assert events == expected


def test_the_key_mask_travels_as_bits_in_the_batch_of_k_and_v(gloo):
    """A bit a key, rounded up to bytes; the backward sends no gradient for it."""
    case = Case("contiguous", MASKS["full"], ranks=3, length=57, key_mask="random")
    plain = replace(case, key_mask=None)
    counts = [gloo(3, count_sends, c, *(PerRank(*x) for x in c.inputs()))[0] for c in (case, plain)]
    for masked, unmasked in zip(*counts, strict=True):
        more = sorted(masked_bytes - plain_bytes for (_, masked_bytes), (_, plain_bytes) in zip(masked, unmasked, strict=True))
        assert more[-2:] == [case.batch * -(-19 // 8)] * 2
        assert not any(more[:-2])


def trace_events(group, case, *shards):
    events: list[str] = []
    batch, compute = dist.batch_isend_irecv, Blockwise.merged

    def batched(operations):
        assert [operation.op for operation in operations] == [dist.isend, dist.irecv]
        events.append("hop")
        return batch(operations)

    def attending(*arguments):
        events.append("attend")
        return compute(*arguments)

    with patch.object(dist, "batch_isend_irecv", batched), patch.object(Blockwise, "merged", attending):
        ring_attention(*(torch.from_numpy(x) for x in shards[:3]), group=group, **options(case.plan))
    return events


@pytest.mark.parametrize("as_mesh", [False, True], ids=["process groups", "device mesh"])
def test_sub_groups_shard_batch_and_sequence_together(gloo, as_mesh):
    """Eight ranks as two rings of four: each ring computes its own batch rows."""
    case = Case(ranks=4, batch=2)
    halves = [[x[row : row + 1] for x in shards] for shards in case.inputs() for row in range(2)]
    per_rank = [PerRank(*halves[2 * i], *halves[2 * i + 1]) for i in range(5)]
    results = gloo(8, in_two_rings, case, as_mesh, *per_rank)
    rows = [[case.gather([r[i] for r in results[4 * row : 4 * row + 4]], of) for i, of in enumerate("qqqkk")] for row in range(2)]
    check(case, Attention(*(np.concatenate(pair) for pair in zip(*rows, strict=True))))


def in_two_rings(world, case, as_mesh, *shards):
    if as_mesh:
        ring = init_device_mesh("cpu", (2, 4), mesh_dim_names=("data", "seq"))["seq"]
        return on_rank(ring, case, *shards)
    rings = [dist.new_group(ranks) for ranks in ([0, 1, 2, 3], [4, 5, 6, 7])]
    return on_rank(rings[dist.get_rank() // 4], case, *shards)


def test_tensors_of_a_gpu_over_gloo_are_refused_on_every_rank(gloo):
    gloo.refuse("served by gloo, which sends no tensor of a GPU", 2, to_a_gpu)


def to_a_gpu(group):
    with patch.object(dist, "get_backend_config", lambda *_: "cpu:gloo,meta:gloo"):
        send((torch.zeros(3, device="meta"),), 1, group)
