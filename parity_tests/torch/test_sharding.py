"""Whole sequences to shards in PyTorch: every token of every shard by hand, torch.compile, and the loss of uneven shards."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ring_attn_torch import document_extents, prefix_extents, shard_batch

from ..support.shards import DOCUMENTS, EVERYTHING, IDS, KEY_MASK, LENGTH, check_shard, extents, shard


def tensors(options: dict) -> dict:
    return {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}


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
