"""Whole sequences to shards in PyTorch: every token of every shard by hand, torch.compile, and the loss of uneven shards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ring_attn_core import LAYOUTS
from ring_attn_torch import document_extents, loss, prefix_extents, shard_batch

from ..support.models import Arrays, assert_near
from ..support.shards import (
    DOCUMENTS,
    EVERYTHING,
    IDS,
    IMPOSSIBLE,
    IMPOSSIBLE_GRADIENT,
    KEY_MASK,
    LENGTH,
    OPTIONS,
    RANKS,
    UNEVEN,
    UNEVEN_LABELS,
    check_shard,
    extents,
    shard,
    uneven,
    uneven_loss,
)
from ..support.spawn import PerRank
from .models import Group, rank_in, ranks_of


def tensors(options: dict) -> dict:
    return {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}


@pytest.mark.pairs
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_token_of_every_shard_is_right(layout, ranks):
    for options in OPTIONS:
        expected = [shard(IDS, layout, ranks, rank, **options) for rank in range(ranks)]
        for rank in range(ranks):
            check_shard(shard_batch(torch.from_numpy(IDS), layout, ranks, rank, **tensors(options)), expected[rank], LENGTH)
        whole = {name: np.concatenate([e[name] for e in expected], 1) for name in expected[0]}
        check_shard(shard_batch(torch.from_numpy(IDS), layout, ranks, **tensors(options)), whole, LENGTH)


@pytest.mark.parametrize("rank", [None, 0, 2])
@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_every_tensor_of_a_shard_is_contiguous(options, rank):
    batch = shard_batch(torch.from_numpy(IDS), "zigzag", 3, rank, **tensors(options))
    assert [name for name, x in batch._asdict().items() if isinstance(x, torch.Tensor) and not x.is_contiguous()] == []
    assert batch.labels.view(-1).shape == (batch.labels.numel(),)


def test_shard_batch_compiles_as_one_graph():
    def program(ids, documents, key_mask):
        return shard_batch(ids, "zigzag", 3, 1, documents=documents, key_mask=key_mask, restart_positions=True)

    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    got = compiled(*map(torch.from_numpy, (IDS, DOCUMENTS, KEY_MASK)))
    check_shard(got, shard(IDS, "zigzag", 3, 1, **EVERYTHING), LENGTH)


def test_cu_seqlens_and_prefix_compile_as_one_graph():
    packed = torch.compile(lambda ends: document_extents(cu_seqlens=ends, length=9), fullgraph=True, backend="aot_eager")
    expected = extents(np.array([[0, 0, 0, 2, 2, 2, 2, -1, -1]]))
    np.testing.assert_array_equal(packed(torch.tensor([0, 3, 3, 7], dtype=torch.int32)), expected)
    prefix = torch.compile(lambda prefix: prefix_extents(prefix, 4), fullgraph=True, backend="aot_eager")
    np.testing.assert_array_equal(prefix(torch.tensor([0, 3]))[..., 1], [[1, 2, 3, 4], [3, 3, 3, 4]])


def test_a_million_tokens_take_no_more_operations_than_sixteen():
    def operations(tokens: int) -> int:
        ids = torch.zeros(1, tokens, dtype=torch.long)
        with Count() as count:
            shard_batch(ids, "zigzag", 8, 3, documents=ids, key_mask=ids > 0, restart_positions=True)
            document_extents(cu_seqlens=torch.tensor([0, tokens]), length=tokens)
            prefix_extents(torch.tensor([5]), tokens)
        return count.operations

    assert operations(2**20) == operations(16)


class Count(TorchDispatchMode):
    """Counts the operations that torch runs."""

    operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        return func(*args, **kwargs or {})


def test_loss_of_uneven_shards_is_one_devices(gloo):
    ids, embedding, head = uneven()
    batch = shard_batch(torch.from_numpy(ids), "contiguous", 4, documents=torch.from_numpy(UNEVEN))
    assert [int((x != -100).sum()) for x in batch.labels.chunk(4, 1)] == UNEVEN_LABELS
    results = gloo(4, uneven_on_rank, ids, embedding, head)
    assert len({float(result["loss"]) for result in results}) == 1
    summed = {name: np.sum([result[name] for result in results], 0) for name in ("embedding", "head")}
    assert_near({"loss": results[0]["loss"], **summed}, uneven_loss(), 1e-6)
    assert_near(uneven_on_rank(None, ids, embedding, head), uneven_loss(), 1e-6)


def uneven_on_rank(group: Group, ids: np.ndarray, embedding: np.ndarray, head: np.ndarray) -> Arrays:
    """The loss of all ranks and this rank's part of its gradients."""
    documents = torch.from_numpy(UNEVEN)
    batch = shard_batch(torch.from_numpy(ids), "contiguous", ranks_of(group), rank_in(group), documents=documents)
    weights = {"embedding": torch.from_numpy(embedding).requires_grad_(), "head": torch.from_numpy(head).requires_grad_()}
    value = loss(weights["embedding"][batch.ids] @ weights["head"], batch.labels, group=group)
    value.backward()
    return {"loss": value.detach().numpy()} | {name: w.grad.numpy() for name, w in weights.items() if w.grad is not None}


def test_loss_is_inf_with_finite_gradients_where_a_label_is_impossible(gloo):
    whole = impossible_on_rank(None, IMPOSSIBLE)
    ring = gloo(4, impossible_on_rank, PerRank(*np.split(IMPOSSIBLE, 4, 1)))
    assert [value for value, _ in (whole, *ring)] == [np.inf] * 5
    for gradient in (whole[1], np.concatenate([part for _, part in ring], 1)):
        np.testing.assert_allclose(gradient, IMPOSSIBLE_GRADIENT, rtol=1e-6)


def impossible_on_rank(group: Group, logits: np.ndarray) -> tuple[float, np.ndarray]:
    leaf = torch.from_numpy(logits).requires_grad_()
    value = loss(leaf, torch.ones(leaf.shape[:2], dtype=torch.long), group=group)
    value.backward()
    assert leaf.grad is not None
    return value.item(), leaf.grad.numpy()
