"""The masks of flex_attention as programs use them: functions that read what changes, and block masks that do not fit."""

# pyright: reportArgumentType=false, reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from ring_attn_torch import functional
from ring_attn_torch.functional import block_masks

from .test_functional_use import drawn


def test_a_mask_mod_is_evaluated_once_until_something_that_it_reads_changes():
    calls, documents = [], torch.tensor([0, 0, 0, 1, 1, 1])

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        len("evaluated")
        return documents[q_idx] == documents[kv_idx]

    counted = lambda *arguments: calls.append(1) or evaluated(*arguments)
    evaluated = block_masks._evaluate
    qkv = drawn(2, 2, 6, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_masks, "_evaluate", counted)
        block_mask = flex.create_block_mask(mask_mod, None, None, 6, 6, "cpu")
        first = [functional.flex_attention(*qkv, block_mask=block_mask) for _ in range(3)]
        assert len(calls) == 1
        documents[3] = 0  # in place: the BlockMask lists one block, so it still is right
        changed = functional.flex_attention(*qkv, block_mask=block_mask)
        assert len(calls) == 2
        documents = torch.tensor([0, 0, 0, 1, 1, 1])  # another tensor in the closure
        again = functional.flex_attention(*qkv, block_mask=block_mask)
        assert len(calls) == 3
    assert torch.equal(first[0], again)
    assert not torch.equal(first[0], changed)
    del block_mask
    assert not len(block_masks._known)


@pytest.mark.parametrize(
    "write", [lambda x: x.data.__setitem__(3, 0), lambda x: x.numpy().__setitem__(3, 0)], ids=["data", "numpy"]
)
def test_a_tensor_that_changes_without_a_trace_is_noticed(write):
    documents = torch.tensor([0, 0, 0, 1, 1, 1])
    block_mask = flex.create_block_mask(lambda b, h, i, j: documents[i] == documents[j], None, None, 6, 6, "cpu")
    qkv = drawn(2, 2, 6, 4)
    before = functional.flex_attention(*qkv, block_mask=block_mask)
    (documents.data if write == "data" else documents.numpy())[3] = 0
    after = functional.flex_attention(*qkv, block_mask=block_mask)
    assert not torch.equal(before, after)


class Window:
    """A state that nothing can watch."""

    size = 1


@pytest.mark.parametrize("window", [Window(), Window, ModuleType("settings")], ids=["object", "class", "module"])
def test_a_mask_mod_that_reads_an_object_is_evaluated_anew(window):
    qkv, window.size = drawn(1, 2, 6, 4), 1
    block_mask = flex.create_block_mask(lambda b, h, i, j: (i - j).abs() <= window.size, None, None, 6, 6, "cpu")
    before = functional.flex_attention(*qkv, block_mask=block_mask)
    window.size = 2
    assert not torch.equal(functional.flex_attention(*qkv, block_mask=block_mask), before)


def attribute(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i - j).abs() <= attribute.widest


def imported(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    from window_of_a_test import widest

    return (i - j).abs() <= widest


def reflected(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i - j).abs() <= vars(attribute)["widest"]


@pytest.mark.parametrize("way", ["attribute", "imported", "reflected", "a method of a dict", "a method of a tensor"])
def test_a_mask_mod_that_reads_by_a_detour_is_evaluated_anew(way, monkeypatch):
    module, table, tensor = ModuleType("window_of_a_test"), {"widest": 1}, torch.tensor([1])
    monkeypatch.setitem(sys.modules, module.__name__, module)
    of_table, of_tensor = table.get, tensor.sum
    mask_mod = {
        "attribute": attribute,
        "imported": imported,
        "reflected": reflected,
        "a method of a dict": lambda b, h, i, j: (i - j).abs() <= of_table("widest"),
        "a method of a tensor": lambda b, h, i, j: (i - j).abs() <= of_tensor(),
    }[way]

    def widen(to: int) -> None:
        attribute.widest = module.widest = table["widest"] = to
        tensor.fill_(to)

    qkv = drawn(1, 2, 6, 4)
    widen(1)
    block_mask = flex.create_block_mask(mask_mod, None, None, 6, 6, "cpu")
    before = functional.flex_attention(*qkv, block_mask=block_mask)
    widen(2)
    assert not torch.equal(functional.flex_attention(*qkv, block_mask=block_mask), before)


@pytest.mark.parametrize(("batch", "heads"), [(3, None), (2, 3), (None, 2), (1, 8)])
def test_a_block_mask_of_other_batch_rows_or_heads_is_refused(batch, heads):
    block_mask = flex.create_block_mask(lambda b, h, i, j: i >= j, batch, heads, 6, 6, "cpu")
    with pytest.raises(ValueError, match=r"block_mask is for \(heads, batch rows\) = .*, and the call has \(4, 2\)"):
        functional.flex_attention(*drawn(2, 4, 6, 8), block_mask=block_mask)


def test_a_block_mask_of_no_batch_row_gives_none():
    block_mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 6, 6, "cpu")
    assert functional.flex_attention(*drawn(0, 4, 6, 8), block_mask=block_mask).shape == (0, 4, 6, 8)


def test_a_block_mask_whose_blocks_and_mask_mod_disagree_is_refused():
    """Check listed blocks: torch's compiled kernels read the blocks alone, and its eager code the mask_mod."""
    qkv, count = drawn(1, 1, 8, 4), torch.ones(1, 1, 2, dtype=torch.int32)
    diagonal = torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
    block_mask = flex.BlockMask.from_kv_blocks(count, diagonal, BLOCK_SIZE=4, seq_lengths=(8, 8))
    with pytest.raises(ValueError, match="block_mask lists blocks that contradict its mask_mod"):
        functional.flex_attention(*qkv, block_mask=block_mask)


@pytest.mark.parametrize("mask_mod", ["causal", 3, lambda b, h, i, j: i >= j])
def test_an_invalid_block_mask_is_refused(mask_mod):
    with pytest.raises(ValueError, match="block_mask must be a BlockMask"):
        functional.flex_attention(*drawn(1, 1, 4, 4), block_mask=mask_mod)


def test_a_long_block_mask_is_refused_before_it_is_evaluated():
    qkv = drawn(1, 1, 32769, 1)
    count, blocks = torch.full((1, 1, 2), 2, dtype=torch.int32), torch.tensor([[[[0, 1], [0, 1]]]], dtype=torch.int32)
    block_mask = flex.BlockMask.from_kv_blocks(count, blocks, BLOCK_SIZE=2**15, seq_lengths=(32769, 32769))
    with pytest.raises(ValueError, match="at most 32768 tokens are: call ring_attention"):
        functional.flex_attention(*qkv, block_mask=block_mask)
