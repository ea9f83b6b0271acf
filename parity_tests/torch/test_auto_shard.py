"""RingTransformer(auto_shard=True): whole sequences in, whole logits out, with the gradients of one device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ring_attn_core import full
from ring_attn_torch import RingTransformer, from_numpy, loss, sum_gradients

from ..support.models import LENGTH, TRANSFORMER, Arrays, assert_near, token_ids, transformer_weights
from ..support.spawn import PerRank
from .models import Group, gradients, rank_in

SIZES = TRANSFORMER | {"param_dtype": "float64", "tied": False}
ROWS = 6
MASK = np.arange(LENGTH) < np.array([37, 20, 30, 1, 36, 25])[:, None]


def batch(masked: bool) -> dict[str, torch.Tensor]:
    """ids, labels and, if there is one, the mask of all rows; what the mask hides has no label."""
    ids, labels = token_ids(ROWS)
    labels = np.where(MASK, labels, -100) if masked else labels
    arrays = {"ids": ids, "labels": labels} | ({"mask": MASK} if masked else {})
    return {name: torch.from_numpy(x) for name, x in arrays.items()}


def step(group: Group, rows: slice, data: dict[str, torch.Tensor], arguments: dict[str, Any], auto_shard: bool = True) -> Arrays:
    """Logits of these rows, the loss of all ranks, and every weight's gradient summed over them."""
    made = {name: x for name, x in arguments.items() if name != "dropout_seed"}
    model = from_numpy(RingTransformer(**SIZES | made, group=group, auto_shard=auto_shard), transformer_weights(False))
    called = {"dropout_seed": arguments["dropout_seed"]} if "dropout_seed" in arguments else {}
    if "mask" in data:
        called["mask" if auto_shard else "key_mask"] = data["mask"][rows]
    logits = model(data["ids"][rows], **called)
    assert logits.shape[1] == LENGTH
    value = loss(logits, data["labels"][rows], group=group)
    value.backward()
    sum_gradients(model, group)
    return {"logits": logits.detach().numpy(), "loss": value.detach().numpy(), **gradients(model)}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("counts", [(6,), (4, 2), (1, 3, 0, 2)], ids=str)
def test_ragged_batches_are_one_devices(gloo, counts, masked):
    """With dropout, which draws for a row by its number among all, and a mask that is not causal, which padding would show in."""
    arguments = {"mask": full(), "dropout_rate": 0.2, "dropout_seed": 3} | ({"layout": "striped"} if masked else {})
    ends = np.cumsum(counts)
    rows = [slice(int(end - count), int(end)) for count, end in zip(counts, ends, strict=True)]
    data = batch(masked)
    expected = step(None, slice(None), data, arguments | {"layout": "contiguous"}, auto_shard=False)
    for mine, got in zip(rows, gloo(len(counts), step, PerRank(*rows), data, arguments), strict=True):
        assert_near({"logits": got["logits"]} if got["logits"].size else {}, own_logits(expected, mine), 1e-12)
        assert_near(without_logits(got), without_logits(expected), 1e-11)


def own_logits(arrays: Arrays, rows: slice) -> Arrays:
    return {"logits": arrays["logits"][rows]} if rows.stop > rows.start else {}


def without_logits(arrays: Arrays) -> Arrays:
    return {name: x for name, x in arrays.items() if name != "logits"}


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_replicated_batch_is_one_devices(gloo, ranks):
    data = batch(masked=True)
    expected = step(None, slice(None), data, {"layout": "contiguous"}, auto_shard=False)
    for got in gloo(ranks, step, slice(None), data, {}):
        assert_near(got, expected, 1e-11)


def test_rows_that_all_ranks_bring_are_computed_once(gloo):
    assert gloo(2, rows_computed_on_rank, PerRank(0, 0)) == [1, 1]
    assert gloo(2, rows_computed_on_rank, PerRank(0, 1)) == [2, 2]


def rows_computed_on_rank(group: Group, first: int) -> int:
    model, seen = RingTransformer(**SIZES, group=group, auto_shard=True), []
    model.blocks[0].register_forward_pre_hook(lambda block, inputs: seen.append(len(inputs[0])))
    model(torch.from_numpy(token_ids(ROWS)[0][first : first + 1]))
    return seen[0]


def test_some_ranks_may_have_no_mask(gloo):
    data = batch(masked=True)
    expected = step(
        None,
        slice(0, 2),
        data | {"mask": torch.from_numpy(MASK) | (torch.arange(ROWS) == 0)[:, None]},
        {"layout": "contiguous"},
        False,
    )
    got = gloo(2, masked_on_one_rank)
    np.testing.assert_allclose(np.concatenate(got), expected["logits"], rtol=1e-9, atol=1e-12)


def masked_on_one_rank(group: Group) -> np.ndarray:
    rank, data = rank_in(group), batch(masked=True)
    model = from_numpy(RingTransformer(**SIZES, group=group, auto_shard=True), transformer_weights(False))
    mask = data["mask"][1:2] if rank == 1 else None
    return model(data["ids"][rank : rank + 1].to([torch.int32, torch.int64][rank]), mask=mask).detach().numpy()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (((2, 7), (1, 8)), "^the ranks bring sequences of 7, 8 tokens: pad them"),
        (((2, 7), (7,)), r"^rank 1: ids must be integers \[batch, tokens\], .*, got torch.int64 \[7\]"),
    ],
)
def test_unfitting_ids_are_refused_on_all_ranks(gloo, inputs, message):
    gloo.refuse(message, 2, called_on_rank, PerRank(*inputs))


def called_on_rank(group: Group, shape: tuple[int, ...]) -> None:
    RingTransformer(**SIZES, group=group, auto_shard=True)(torch.ones(shape, dtype=torch.int64))
