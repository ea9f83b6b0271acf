"""Tests of the documents of a packed row: position_ids and cu_seq_lens_q agree, or every rank refuses the call."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from transformers import DataCollatorWithFlattening

from ring_attn_torch.transformers.documents import check_documents
from ring_attn_torch.transformers.masks import CallArguments, CallRing

from .test_transformers_refusals import check_refused

IDS = torch.ones(1, 8, dtype=torch.long)


def checked(given: dict[str, Any], length: int) -> None:
    """Check the documents of one row."""
    model: Any = None
    check_documents(CallArguments(model, CallRing(), given, torch.ones(1, length)))


@pytest.mark.parametrize("start", [0, 2])
def test_ends_of_documents_that_transformers_collator_writes_beside_positions_pass(start):
    """With documents of one token, and with positions that RoBERTa's models begin at 2, where the release knows that."""
    if start and "position_ids_start" not in inspect.signature(DataCollatorWithFlattening).parameters:
        pytest.skip("this transformers counts positions from 0")
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    collator.position_ids_start = start
    given: dict[str, Any] = dict(collator([{"input_ids": [5] * tokens} for tokens in (4, 1, 1, 3)]))
    assert given["cu_seq_lens_q"].tolist() == [0, 4, 5, 6, 9]
    checked(given, 9)
    checked(given | {"position_ids": given["position_ids"].expand(4, 1, 9)}, 9)  # of Qwen-VL
    checked(given | {"position_ids": torch.zeros(3, 1, 9)}, 9)  # without positions in the text
    for ends in ([0, 4, 5, 6, 8, 9], [0, 3, 5, 6, 9]):
        with pytest.raises(ValueError, match="cu_seq_lens_q and position_ids disagree"):
            checked(given | dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor(ends)), 9)


@pytest.mark.parametrize("positions", [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 0, 0, 0, 0]])
def test_positions_that_name_no_document_leave_it_to_the_ends(positions: list[int]):
    """As those of a model without packing, and those of padding, which repeat 0."""
    given = {"position_ids": torch.tensor([positions]), "cu_seq_lens_q": torch.tensor([0, 3, 7])}
    checked(given, 7)


def test_ends_and_positions_may_differ_at_padding_that_a_mask_names():
    given = {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 0, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0]])}
    checked(given | {"cu_seq_lens_q": torch.tensor([0, 3, 5, 7])}, 7)
    with pytest.raises(ValueError, match="by cu_seq_lens_q a document begins at token 4"):
        checked(given | {"cu_seq_lens_q": torch.tensor([0, 3, 4, 7])}, 7)


CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "ends against positions": (
        {"cu_seq_lens_q": torch.tensor([0, 3, 5, 8]), "position_ids": torch.arange(8)[None] % 3},
        "cu_seq_lens_q and position_ids disagree: by cu_seq_lens_q a document begins at token 5, by position_ids none does",
    ),
    "positions against ends": (
        {"cu_seq_lens_q": torch.tensor([0, 8]), "position_ids": torch.arange(8)[None] % 3},
        "cu_seq_lens_q and position_ids disagree: by position_ids a document begins at token 3, by cu_seq_lens_q none does",
    ),
    "other ends of keys": (
        {"cu_seq_lens_q": torch.tensor([0, 3, 8]), "cu_seq_lens_k": torch.tensor([0, 8])},
        "cu_seq_lens_k must equal cu_seq_lens_q, since a token attends within its document",
    ),
    "ends of keys alone": ({"cu_seq_lens_k": torch.tensor([0, 3, 8])}, "got cu_seq_lens_k without cu_seq_lens_q"),
    "ends with a cache": (
        {"cu_seq_lens_q": torch.tensor([0, 5, 8]), "use_cache": True},
        "cu_seq_lens_q came with a cache, which keeps one growing text a row",
    ),
    "ends as a list": ({"cu_seq_lens_q": [0, 5, 8]}, "cu_seq_lens_q must be a tensor, got"),
    "ends of rows": (
        {"cu_seq_lens_q": torch.tensor([[0, 5, 8]])},
        r"cu_seq_lens_q must be integers \[documents \+ 1\], got torch.int64 \[1, 3\]",
    ),
}


@pytest.mark.slow
def test_documents_that_contradict_each_other_are_refused_on_every_rank(four: Any):
    check_refused(four, {name: ({"input_ids": IDS} | more, words) for name, (more, words) in CALLS.items()})
