"""Log-probabilities and entropies of tokens in PyTorch: values and gradients against all logits in float64, and their memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ring_attn_torch import loss, token_log_probs

from ..support.losses import cotangents_of_tokens, exact_log_probs, hidden_states
from ..support.models import Arrays, assert_near
from .memory import peak_bytes


def results(values: Any, cotangents: tuple[np.ndarray, np.ndarray], **leaves: Tensor) -> Arrays:
    gradients = torch.autograd.grad(values, [*leaves.values()], [torch.from_numpy(y).to(values[0].dtype) for y in cotangents])
    named = dict(zip((f"d{name}" for name in leaves), gradients, strict=True)) | dict(
        zip(("logp", "entropy"), values, strict=True)
    )
    return {name: x.detach().double().numpy() for name, x in named.items()}


@pytest.mark.parametrize("frozen", ["hidden", "head"])
def test_a_frozen_argument_gets_no_gradient_and_the_other_its_own(frozen):
    arrays, cotangents = hidden_states(), cotangents_of_tokens()
    truth = exact_log_probs(*arrays, cotangents[0], 0 * cotangents[1])
    hidden, head, labels = (torch.from_numpy(x) for x in arrays)
    name, leaf = ("head", head) if frozen == "hidden" else ("hidden", hidden)
    leaf.requires_grad_()
    logp = token_log_probs(hidden, labels, head=head, chunk=7)
    (gradient,) = torch.autograd.grad(logp, leaf, torch.from_numpy(cotangents[0]))
    assert_near({name: gradient.numpy()}, {name: truth[f"d{name}"]}, 1e-14)


def test_autocast_multiplies_in_its_dtype():
    hidden, head, labels = (torch.from_numpy(x) for x in hidden_states(np.float32))
    with torch.autocast("cpu", torch.bfloat16):
        values = token_log_probs(hidden, labels, head=head, chunk=7)
    assert torch.equal(values, token_log_probs(hidden.bfloat16(), labels, head=head, chunk=7))  # type: ignore[arg-type]


def test_a_backward_inside_autocast_has_the_gradients_of_one_outside():
    hidden, head, labels = (torch.from_numpy(x) for x in hidden_states(np.float32))
    leaves, cotangents = {"hidden": hidden.requires_grad_(), "head": head.requires_grad_()}, cotangents_of_tokens()
    with torch.autocast("cpu", torch.bfloat16):
        call = lambda: token_log_probs(hidden, labels, head=head, chunk=7, entropy=True)
        outside, inside = call(), results(call(), cotangents, **leaves)
    assert_near(inside, results(outside, cotangents, **leaves), 0)


@pytest.mark.parametrize("given", ["hidden", pytest.param("logits", marks=pytest.mark.exhaustive)])
def test_log_probs_compile_as_one_graph(given):
    hidden, head, labels = (torch.from_numpy(x) for x in hidden_states())
    leaves = hidden.requires_grad_(), head.requires_grad_()

    def objective(hidden: Tensor, head: Tensor) -> Tensor:
        of: dict[str, Any] = {"head": head} if given == "hidden" else {}
        logp, entropy = token_log_probs(hidden if of else hidden @ head.T, labels, chunk=32, entropy=True, **of)
        return (logp.sin() + entropy).sum()

    compiled = torch.compile(objective, fullgraph=True, backend="aot_eager")
    for a, b in zip(*(torch.autograd.grad(of(*leaves), leaves) for of in (compiled, objective)), strict=True):
        torch.testing.assert_close(a, b)


ROWS, WORDS = 512, 4096


def test_log_probs_of_hidden_states_take_some_chunks_of_logits():
    hidden = torch.randn(1, ROWS, 16, requires_grad=True)
    head = torch.randn(WORDS, 16, requires_grad=True)
    labels = torch.randint(WORDS, (1, ROWS))
    chunk = 32 * WORDS * 4  # bytes, of which all logits have 16 times as many
    allocated = peak_bytes(lambda: token_log_probs(hidden, labels, head=head, chunk=32).sum().backward())  # type: ignore[union-attr]
    assert allocated <= 2.6 * chunk + 2 * (hidden.nbytes + head.nbytes)


@pytest.mark.parametrize("given", ["hidden", "logits"])
@pytest.mark.parametrize("of", [loss, lambda *x, **named: token_log_probs(*x, entropy=True, **named)[0].sum()])
def test_a_second_derivative_raises_instead_of_being_dropped(of, given):
    x, head = torch.randn(1, 3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    labels = torch.tensor([[0, 1, 2]])
    value = of(x, labels, head=head) if given == "hidden" else of(x @ head.T, labels)
    for leaf in (x, head):
        (gradient,) = torch.autograd.grad(value, leaf, create_graph=True)
        penalty = (gradient**2).sum() + (leaf**2).sum()
        with pytest.raises(RuntimeError, match="loss and token_log_probs have no second derivative"):
            torch.autograd.grad(penalty, leaf)
