"""The balanced layout of PyTorch: under "direct", in models and datasets, and refused on all ranks alike."""

from __future__ import annotations

import re
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ring_attn_core import causal, records
from ring_attn_core.plan.balanced import balanced_layout
from ring_attn_core.plan.balanced_layout import BalancedLayout
from ring_attn_core.plan.ring import RingPlan
from ring_attn_core.problem.traffic import traffic
from ring_attn_torch import RingTransformer, SequenceShardedDataset, from_layout, gather, ring_attention, shard_batch, to_layout
from ring_attn_torch.attend.keys import Keys
from ring_attn_torch.attend.one_run import as_one_run
from ring_attn_torch.attend.score import Score
from ring_attn_torch.ring import agreement

from ..support import corpus
from ..support.balanced import CASES, DIRECT_CASES, DISORDERED_CASES, batch_of_documents
from ..support.cases import check, check_same
from ..support.selection import first
from ..support.spawn import PerRank
from ..support.strategies import problem_of
from .ring import check_late_ranks, run
from .test_strategies import count


@pytest.mark.parametrize("case", first(DIRECT_CASES, 4), ids=str)
def test_keys_sent_to_their_readers_alone_are_exact(gloo, case):
    check(case, run(gloo, case))


@pytest.mark.parametrize("case", DISORDERED_CASES, ids=str)
def test_direct_is_exact_if_runs_are_not_in_order_of_position(gloo, case):
    check(case, run(gloo, case))


@pytest.mark.parametrize("case", [DIRECT_CASES[0], DIRECT_CASES[2], DIRECT_CASES[5]], ids=str)
def test_direct_sends_what_the_plan_says(gloo, case):
    counted = gloo(case.ranks, count, case, *(PerRank(*x) for x in case.inputs()))
    assert counted == [traffic(problem_of(case, "torch"), rank) for rank in range(case.ranks)]


@pytest.mark.parametrize("delays", first([3, 100], 1, 1, "campaign"))
def test_delays_of_ranks_change_no_bit_of_direct(gloo, delays):
    check_late_ranks(gloo, DIRECT_CASES[0], delays)


OF_FOUR: Any = balanced_layout((24, 24, 8, 8), 4)


def refusal_of_extents(group: Any) -> str:
    """Return the error of a call of "direct" whose queries may see all keys, in a layout of documents."""
    extents = torch.tensor([0, 64]).repeat(1, 16, 1)
    return refusal(group, OF_FOUR, {"strategy": "direct", "extents": extents})


def test_extents_beyond_the_documents_of_the_layout_are_refused_on_all_ranks(gloo):
    refused = gloo(4, refusal_of_extents)
    assert len(set(refused)) == 1 and "sends the keys of the documents that the layout was made for" in refused[0]


def test_extents_that_change_in_place_are_converted_anew():
    plan = RingPlan(OF_TWO, causal(), 2, 16)
    extents = torch.tensor([0, 20], dtype=torch.int32).repeat(1, 16, 1)
    keys, score = Keys(torch.zeros(1, 16, 1, 8)), Score(1.0, None, 0.0, extents)
    converted: Any = lambda: as_one_run(plan.rows(0, 1), keys, score, 16, plan.band)[2].extents
    before = converted()
    assert converted() is before
    extents[..., 0] = 15
    after = converted()
    score = score._replace(extents=extents.clone())
    assert torch.equal(after, converted()) and not torch.equal(before, after)


def test_two_runs_give_the_same_bits(gloo):
    check_same(run(gloo, CASES[0]), run(gloo, CASES[0]))


def refusal(group: Any, layout: Any, options: dict[str, Any]) -> str:
    q = torch.zeros(1, 16, 4, 8)
    try:
        ring_attention(q, q, q, group=group, layout=layout, **options)
    except ValueError as error:
        return str(error)
    return "no error"


OF_TWO: Any = balanced_layout((20, 12), 2)


def test_another_list_of_documents_on_one_rank_is_refused_on_all(gloo):
    layouts = balanced_layout((20, 12), 2), balanced_layout((7, 25), 2)
    for message in gloo(2, refusal, PerRank(*layouts), {}):
        assert "layout" in message and "balanced over 2 ranks, length 32" in message


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: gather(x[..., None], layout=OF_TWO), "this layout deals 32 tokens to 2 ranks, got 32 tokens and 1 ranks"),
        (lambda x: gather(x[..., None], layout="balanced"), "a balanced layout follows from documents"),
        (lambda x: to_layout(x, OF_TWO, 2), "this layout deals 32 tokens to 2 ranks, got 9 tokens"),
        (lambda x: shard_batch(x, "balanced", 2, tree=([-1], [10])), "a row of the tree has 10 tokens, and ids have 9"),
        (lambda x: shard_batch(x, "balanced", 2, documents=torch.tensor([[0, 0, 1, 1, 0, 0, 0, 0, 0]])), "must not decrease"),
        (lambda x: shard_batch(x.to("meta"), "balanced", 2), "follows from the values of documents"),
    ],
)
def test_a_mistake_says_what_to_do(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(torch.zeros(1, 9, dtype=torch.long))


def test_a_layout_survives_torch_compile():
    q = torch.randn(1, 32, 2, 8)
    layout = BalancedLayout((((7, 25), (0, 7)),), 32)
    compiled = torch.compile(lambda q: ring_attention(q, q, q, layout=layout), fullgraph=True, backend="eager")
    order = torch.tensor(layout.positions(0))
    expected = ring_attention(q[:, order.argsort()], q[:, order.argsort()], q[:, order.argsort()])[:, order]
    torch.testing.assert_close(compiled(q), expected)


def logits_of(group: Any, ids: np.ndarray, documents: np.ndarray, activations: str) -> np.ndarray:
    """Return whole logits and the gradient of the embedding of packed documents, from this rank's shard."""
    torch.manual_seed(0)
    model = RingTransformer(vocab=99, dim=16, depth=2, heads=4, kv_heads=2, activations=activations, group=group)
    whole, owner = torch.from_numpy(ids), torch.from_numpy(documents)
    shard = shard_batch(whole, "balanced", group.size(), group.rank(), documents=owner)
    assert shard.layout is not None
    logits = model(shard.ids, None, shard.length, extents=shard.extents, layout=shard.layout)
    (logits.square() * (shard.positions < shard.length)[..., None]).sum().backward()
    assert model.embed.weight.grad is not None
    dist.all_reduce(model.embed.weight.grad, group=group)
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(parts, logits.detach(), group=group)
    found = from_layout(torch.cat(parts, 1), shard.layout, group.size(), shard.length)
    return np.concatenate([x.numpy().ravel() for x in (torch.where(owner[..., None] < 0, 0, found), model.embed.weight.grad)])


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_a_model_in_a_balanced_layout_computes_what_one_rank_does(gloo, activations):
    ids, documents, _ = batch_of_documents()
    documents = np.maximum.accumulate(documents, 1)  # no padding, whose logits are of no use
    (alone,), many = gloo(1, logits_of, ids, documents, activations), gloo(4, logits_of, ids, documents, activations)
    for found in many:
        np.testing.assert_allclose(found, alone, rtol=2e-4, atol=2e-4 * np.abs(alone).max())


def test_a_dataset_deals_the_documents_of_each_batch(tmp_path):
    corpus.write_texts(tmp_path)
    of = lambda layout, ranks, rank: SequenceShardedDataset(tmp_path, 32, layout, ranks, rank, batch_size=2)
    batches = zip(of("contiguous", 1, 0), of("balanced", 4, None), *(of("balanced", 4, rank) for rank in range(4)), strict=True)
    layouts = set()
    for whole, all_ranks, *shards in batches:
        assert all_ranks.layout is not None
        layouts.add(all_ranks.layout)
        assert all_ranks.layout == shard_batch(whole.ids, "balanced", 4, documents=whole.extents[..., 0]).layout
        for rank, shard in enumerate(shards):
            at = torch.tensor(all_ranks.layout.positions(rank))
            assert shard.layout == all_ranks.layout
            for name in ("ids", "labels", "extents", "positions"):
                assert torch.equal(getattr(shard, name), getattr(whole, name)[:, at]), name
                assert torch.equal(getattr(shard, name), getattr(all_ranks, name).chunk(4, 1)[rank]), name
    assert len(layouts) > 1


def test_layouts_of_past_batches_are_forgotten_on_every_rank_alike(gloo):
    assert gloo(2, layouts_in_turn) == [(2, 4)] * 2


def layouts_in_turn(group: dist.ProcessGroup) -> tuple[int, int]:
    """Return how many problems the rank still knows, and in how many of six calls it has compared the problem."""
    layouts = [balanced_layout((n, 32 - n), 2) for n in (4, 9, 20)]
    x, known = torch.ones(1, 16, 1, 8), agreement.history_of(group).agreed
    known.clear()
    with patch.object(records, "MAX_KNOWN", 2), patch.object(agreement, "_exchange", wraps=agreement._exchange) as exchanged:
        for i in (0, 1, 1, 2, 2, 0):
            ring_attention(x, x, x, layout=layouts[i], group=group)
    return len(known), exchanged.call_count
