"""The loss in chunks in PyTorch: of hidden states and a head as of the logits, over rings, within a memory that is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ring_attn_core.reference.tolerance import relative_error
from ring_attn_torch import count_labels, loss
from ring_attn_torch.training.cross_entropy import Labels, sum_of_hidden

from ..support.losses import CHUNKS, exact_loss, hidden_states
from ..support.models import Arrays, assert_near
from ..support.spawn import PerRank
from .memory import peak_bytes
from .models import Group


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_loss_of_hidden_states_in_chunks_is_exact_in_float64(gloo, ranks, reduction):
    hidden, head, labels = hidden_states()
    shards = (PerRank(*np.split(x, ranks, 1)) for x in (hidden, labels))
    results = gloo(ranks, chunked_on_rank, *shards, head, reduction)
    truth = exact_loss(hidden, head, labels, reduction)
    for i, _ in enumerate([*CHUNKS, "logits"]):
        mine = [each[i] for each in results]
        got = {"dhidden": np.concatenate([x["dhidden"] for x in mine], 1), "dhead": np.sum([x["dhead"] for x in mine], 0)}
        assert len({float(x["loss"]) for x in mine}) == 1
        assert_near(got | {"loss": mine[0]["loss"]}, {name: truth[name] for name in ("dhidden", "dhead", "loss")}, 1e-14)


def chunked_on_rank(group: Group, hidden: np.ndarray, labels: np.ndarray, head: np.ndarray, reduction: str) -> list[Arrays]:
    """The loss of all ranks and this rank's part of its gradients, for each of CHUNKS, and of logits in chunks of 7."""
    leaves = [torch.from_numpy(x).requires_grad_() for x in (hidden, head)]
    of: dict[str, Any] = {"labels": torch.from_numpy(labels), "reduction": reduction, "group": group}
    values = [loss(leaves[0], head=leaves[1], chunk=chunk, **of) for chunk in CHUNKS]
    values.append(loss(leaves[0] @ leaves[1].T, chunk=7, **of))
    return [named(value, *torch.autograd.grad(value, leaves)) for value in values]


def named(value: Tensor, dhidden: Tensor, dhead: Tensor) -> Arrays:
    return {"loss": value.detach().numpy(), "dhidden": dhidden.double().numpy(), "dhead": dhead.double().numpy()}


def test_accumulated_microbatches_of_uneven_labels_have_the_gradient_of_the_whole_batch(gloo):
    hidden, head, labels = hidden_states()
    labels[1, :30] = -100
    parts = gloo(2, accumulated_on_rank, PerRank(*np.split(hidden, 2, 1)), PerRank(*np.split(labels, 2, 1)), head)
    truth = exact_loss(hidden, head, labels)
    got = {"loss": parts[0]["loss"], "dhead": parts[0]["dhead"] + parts[1]["dhead"]}
    assert_near(got, {name: truth[name] for name in got}, 1e-14)
    assert np.linalg.norm(parts[0]["of_means"] - truth["loss"]) > 1e-3  # the mean of means is another loss


def accumulated_on_rank(group: Group, hidden: np.ndarray, labels: np.ndarray, head: np.ndarray) -> Arrays:
    """A microbatch is a row."""
    x, y = torch.from_numpy(hidden), torch.from_numpy(labels)
    weight = torch.from_numpy(head).requires_grad_()
    rows = [(x[row : row + 1], y[row : row + 1]) for row in range(2)]
    total = sum(count_labels(of, group=group) for _, of in rows)
    values = [loss(hidden, of, head=weight, chunk=7, reduction="sum", group=group) / total for hidden, of in rows]
    for value in values:
        value.backward()
    assert weight.grad is not None
    means = [loss(hidden, of, head=weight, group=group).item() for hidden, of in rows]
    value = sum(value.detach() for value in values)
    return {"loss": np.asarray(value), "dhead": weight.grad.numpy(), "of_means": np.asarray(np.mean(means))}


def test_the_heads_gradient_is_summed_in_float32():
    """Over 2,048 chunks of a token, of bfloat16 hidden states and weights: a sum in bfloat16 would be off by a third."""
    rng = np.random.default_rng(0)
    hidden, head = (torch.from_numpy(rng.standard_normal(shape)).bfloat16() for shape in ((1, 2048, 4), (5, 4)))
    labels = torch.from_numpy(rng.integers(0, 5, (1, 2048)))
    truth = exact_loss(hidden.double().numpy(), head.double().numpy(), labels.numpy(), "sum")
    hidden.requires_grad_()
    head.requires_grad_()
    value = loss(hidden, labels, head=head, chunk=1, reduction="sum")
    value.backward()
    assert value.dtype == torch.float32
    assert hidden.grad is not None and head.grad is not None
    assert hidden.grad.dtype == head.grad.dtype == torch.bfloat16
    np.testing.assert_allclose(value.item(), truth["loss"], rtol=1e-6)
    assert relative_error(head.grad.double().numpy(), truth["dhead"]) <= 2**-8
    assert relative_error(hidden.grad.double().numpy(), truth["dhidden"]) <= 2**-7


def test_autocast_multiplies_in_its_dtype_and_keeps_the_rest_in_float32():
    hidden, head, labels = (torch.from_numpy(x) for x in hidden_states(np.float32))
    head.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(hidden, labels, head=head, chunk=7)
    (dhead,) = torch.autograd.grad(value, head)
    narrow = loss(hidden.bfloat16(), labels, head=head, chunk=7)
    assert value.dtype == dhead.dtype == torch.float32
    assert torch.equal(value, narrow)
    assert torch.equal(dhead, *torch.autograd.grad(narrow, head))
    assert not torch.equal(value, loss(hidden, labels, head=head))


@pytest.mark.parametrize("frozen", ["hidden", "head"])
def test_what_is_frozen_gets_no_gradient_and_the_other_its_own(frozen):
    hidden, head, labels = hidden_states()
    leaves = {name: torch.from_numpy(x).requires_grad_(name != frozen) for name, x in (("hidden", hidden), ("head", head))}
    loss(leaves["hidden"], torch.from_numpy(labels), head=leaves["head"], chunk=7).backward()
    (name,) = {"hidden", "head"} - {frozen}
    grad = leaves[name].grad
    assert leaves[frozen].grad is None and grad is not None
    assert relative_error(grad.numpy(), exact_loss(hidden, head, labels)["d" + name]) <= 1e-14
    of = Labels(torch.from_numpy(labels).flatten().long(), -100, 7)
    assert not sum_of_hidden(leaves["hidden"].detach().flatten(0, 1), leaves["head"].detach(), of)[0].requires_grad


@pytest.mark.parametrize("given", ["hidden", "logits"])
def test_nan_where_there_is_no_label_changes_no_bit(given):
    hidden, head, labels = (torch.from_numpy(x) for x in hidden_states())
    rows = (hidden if given == "hidden" else hidden @ head.T).requires_grad_()
    poisoned = torch.where(labels[..., None] == -100, torch.nan, rows.detach()).requires_grad_()
    of: dict[str, Any] = {"labels": labels, "chunk": 7} | ({"head": head.requires_grad_()} if given == "hidden" else {})
    leaves = [x for x in (of.get("head"),) if x is not None]
    for clean, other in zip(*(taken(loss(x, **of), x, *leaves) for x in (rows, poisoned)), strict=True):
        assert torch.equal(clean, other)


def taken(value: Tensor, *leaves: Tensor) -> list[Tensor]:
    return [value.detach(), *torch.autograd.grad(value, leaves)]


@pytest.mark.parametrize("given", ["hidden", pytest.param("logits", marks=pytest.mark.exhaustive)])
def test_a_loss_in_chunks_compiles_as_one_graph(given):
    hidden, head, labels = (torch.from_numpy(x) for x in hidden_states())
    leaves = hidden.requires_grad_(), head.requires_grad_()
    if given == "hidden":
        objective: Callable[..., Tensor] = lambda hidden, head: loss(hidden, labels, head=head, chunk=32)
    else:
        objective = lambda hidden, head: loss(hidden @ head.T, labels, chunk=32)
    compiled = torch.compile(objective, fullgraph=True, backend="aot_eager")
    for a, b in zip(taken(compiled(*leaves), *leaves), taken(objective(*leaves), *leaves), strict=True):
        torch.testing.assert_close(a, b)


ROWS, WORDS = 512, 4096


def test_the_loss_of_logits_takes_their_gradient_and_little_more():
    logits = torch.randn(1, ROWS, WORDS, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(WORDS, (1, ROWS))
    allocated = peak_bytes(lambda: loss(logits, labels, chunk=32).backward())
    assert allocated <= (1.01 + 6 * 32 / ROWS) * logits.nbytes  # 1 is its gradient
    assert peak_bytes(lambda: F.cross_entropy(logits[0].float(), labels[0]).backward()) >= 5.9 * logits.nbytes


def test_the_loss_of_hidden_states_takes_a_chunk_of_logits():
    hidden = torch.randn(1, ROWS, 16, requires_grad=True)
    head = torch.randn(WORDS, 16, requires_grad=True)
    labels = torch.randint(WORDS, (1, ROWS))
    chunk = 32 * WORDS * 4  # bytes, of which all logits have 16 times as many
    allocated = peak_bytes(lambda: loss(hidden, labels, head=head, chunk=32).backward())
    assert allocated <= 2.5 * chunk + 2 * (hidden.nbytes + head.nbytes)


X, W, Y = torch.ones(2, 4, 3), torch.ones(7, 3), torch.ones(2, 4, dtype=torch.long)


def test_one_ranks_mistake_is_everybodys_error(gloo):
    for outcome in gloo.outcomes(2, mistaken_on_rank, PerRank(7, 6)):
        assert isinstance(outcome, ValueError)
        assert str(outcome).startswith("rank 1: head must be [vocab, 3] for hidden states [2, 4, 3], got [7, 2]")
    for outcome in gloo.outcomes(2, other_reduction_on_rank, PerRank("mean", "sum")):
        assert isinstance(outcome, ValueError)
        assert "disagree on reduction: 'mean' on rank 0, 'sum' on rank 1" in str(outcome)


def mistaken_on_rank(group: Group, ignored: int) -> None:
    """Another ignore_index than other tests have, so that nobody has made this call before."""
    loss(X, Y, head=W if ignored == 7 else W[:, 1:], ignore_index=-7, group=group)


def other_reduction_on_rank(group: Group, reduction: str) -> None:
    loss(X, Y, head=W, ignore_index=-8, reduction=reduction, group=group)
