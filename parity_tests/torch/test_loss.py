"""The loss in chunks in PyTorch: of hidden states and a head as of the logits, over rings, within a memory that is counted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ring_attn_core.reference.tolerance import relative_error
from ring_attn_torch import loss
from ring_attn_torch.training.cross_entropy import Labels, sum_of_hidden

from ..support.losses import exact_loss, hidden_states
from ..support.spawn import PerRank
from .memory import peak_bytes
from .models import Group


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
def test_a_frozen_argument_gets_no_gradient_and_the_other_its_own(frozen):
    hidden, head, labels = hidden_states()
    leaves = {name: torch.from_numpy(x).requires_grad_(name != frozen) for name, x in (("hidden", hidden), ("head", head))}
    loss(leaves["hidden"], torch.from_numpy(labels), head=leaves["head"], chunk=7).backward()
    (name,) = {"hidden", "head"} - {frozen}
    grad = leaves[name].grad
    assert leaves[frozen].grad is None and grad is not None
    assert relative_error(grad.numpy(), exact_loss(hidden, head, labels)["d" + name]) <= 1e-14
    of = Labels(torch.from_numpy(labels).flatten().long(), -100, 7)
    assert not sum_of_hidden(leaves["hidden"].detach().flatten(0, 1), leaves["head"].detach(), of)[0].requires_grad


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
    words = r"^rank 1: head must be \[vocab, 3\] for hidden states \[2, 4, 3\], got \[7, 2\]"
    gloo.refuse(words, 2, mistaken_on_rank, PerRank(7, 6))
    words = "disagree on reduction: 'mean' on rank 0, 'sum' on rank 1"
    gloo.refuse(words, 2, other_reduction_on_rank, PerRank("mean", "sum"))


def mistaken_on_rank(group: Group, ignored: int) -> None:
    """Call with another ignore_index than other tests, so that this call is not a repeated one."""
    loss(X, Y, head=W if ignored == 7 else W[:, 1:], ignore_index=-7, group=group)


def other_reduction_on_rank(group: Group, reduction: str) -> None:
    loss(X, Y, head=W, ignore_index=-8, reduction=reduction, group=group)
