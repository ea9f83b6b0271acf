"""Log-probabilities and entropies of tokens in PyTorch: values and gradients against all logits in float64, and their memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ring_attn_core.reference.tolerance import relative_error
from ring_attn_torch import loss, token_log_probs

from ..support.losses import CHUNKS, cotangents_of_tokens, exact_log_probs, hidden_states
from ..support.models import Arrays, assert_near
from .memory import peak_bytes


def results(values: Any, cotangents: tuple[np.ndarray, np.ndarray], **leaves: Tensor) -> Arrays:
    gradients = torch.autograd.grad(values, [*leaves.values()], [torch.from_numpy(y).to(values[0].dtype) for y in cotangents])
    named = dict(zip((f"d{name}" for name in leaves), gradients, strict=True)) | dict(
        zip(("logp", "entropy"), values, strict=True)
    )
    return {name: x.detach().double().numpy() for name, x in named.items()}


@pytest.mark.parametrize("chunk", CHUNKS)
def test_values_and_gradients_are_exact_in_float64(chunk):
    arrays, cotangents = hidden_states(), cotangents_of_tokens()
    truth = exact_log_probs(*arrays, *cotangents)
    hidden, head, labels = (torch.from_numpy(x) for x in arrays)
    leaves = {"hidden": hidden.requires_grad_(), "head": head.requires_grad_()}
    values = token_log_probs(hidden, labels, head=head, chunk=chunk, entropy=True)
    assert_near(results(values, cotangents, **leaves), {name: truth[name] for name in truth if name != "dlogits"}, 1e-14)
    logits = (hidden @ head.T).detach().requires_grad_()
    values = token_log_probs(logits, labels, chunk=chunk, entropy=True)
    assert_near(results(values, cotangents, logits=logits), {name: truth[name] for name in ("dlogits", "logp", "entropy")}, 1e-14)
    alone = token_log_probs(hidden.detach(), labels, head=head.detach(), chunk=chunk)
    assert isinstance(alone, Tensor)
    assert torch.equal(alone, token_log_probs(hidden, labels, head=head, chunk=chunk, entropy=True)[0])


def test_logits_are_divided_by_the_temperature():
    (hidden, head, labels), cotangents = hidden_states(), cotangents_of_tokens()
    truth = exact_log_probs(hidden, head / 0.7, labels, *cotangents)
    truth |= {name: truth[name] / 0.7 for name in ("dhead", "dlogits")}
    hidden, head, labels = map(torch.from_numpy, (hidden, head, labels))
    leaves = {"hidden": hidden.requires_grad_(), "head": head.requires_grad_()}
    values = token_log_probs(hidden, labels, head=head, chunk=7, entropy=True, temperature=0.7)
    assert_near(results(values, cotangents, **leaves), {name: truth[name] for name in truth if name != "dlogits"}, 1e-14)
    logits = (hidden @ head.T).detach().requires_grad_()
    values = token_log_probs(logits, labels, entropy=True, temperature=0.7)
    assert_near(results(values, cotangents, logits=logits), {name: truth[name] for name in ("dlogits", "logp", "entropy")}, 1e-14)


@pytest.mark.parametrize("frozen", ["hidden", "head"])
def test_what_is_frozen_gets_no_gradient_and_the_other_its_own(frozen):
    arrays, cotangents = hidden_states(), cotangents_of_tokens()
    truth = exact_log_probs(*arrays, cotangents[0], 0 * cotangents[1])
    hidden, head, labels = (torch.from_numpy(x) for x in arrays)
    name, leaf = ("head", head) if frozen == "hidden" else ("hidden", hidden)
    leaf.requires_grad_()
    logp = token_log_probs(hidden, labels, head=head, chunk=7)
    (gradient,) = torch.autograd.grad(logp, leaf, torch.from_numpy(cotangents[0]))
    assert_near({name: gradient.numpy()}, {name: truth[f"d{name}"]}, 1e-14)


def test_bfloat16_gives_float32_and_sums_the_heads_gradient_in_it():
    rng = np.random.default_rng(0)
    hidden, head = (torch.from_numpy(rng.standard_normal(shape)).bfloat16() for shape in ((1, 2048, 4), (5, 4)))
    labels, cotangents = torch.from_numpy(rng.integers(0, 5, (1, 2048))), tuple(rng.standard_normal((2, 1, 2048)))
    truth = exact_log_probs(hidden.double().numpy(), head.double().numpy(), labels.numpy(), *cotangents)
    leaves = {"hidden": hidden.requires_grad_(), "head": head.requires_grad_()}
    values = token_log_probs(hidden, labels, head=head, chunk=1, entropy=True)
    assert values[0].dtype == values[1].dtype == torch.float32
    got = results(values, cotangents, **leaves)
    assert relative_error(got["logp"], truth["logp"]) <= 1e-6
    assert relative_error(got["entropy"], truth["entropy"]) <= 1e-6
    assert relative_error(got["dhead"], truth["dhead"]) <= 2**-7
    assert relative_error(got["dhidden"], truth["dhidden"]) <= 2**-7


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


def test_the_weighted_sum_is_the_loss():
    hidden, head, labels = (torch.from_numpy(x) for x in hidden_states())
    value = -token_log_probs(hidden, labels, head=head, chunk=7).sum()  # type: ignore[union-attr]
    torch.testing.assert_close(value, loss(hidden, labels, head=head, reduction="sum"))


@pytest.mark.parametrize("given", ["hidden", "logits"])
def test_nan_where_there_is_no_label_changes_no_bit_and_a_strange_label_is_nan(given):
    hidden, head, labels = (torch.from_numpy(x) for x in hidden_states())
    rows = hidden if given == "hidden" else hidden @ head.T
    poisoned = torch.where(labels[..., None] == -100, torch.nan, rows)
    of: dict[str, Any] = {"head": head.requires_grad_()} if given == "hidden" else {}
    cotangents = cotangents_of_tokens()
    clean, other = (
        results(token_log_probs(x.requires_grad_(), labels, chunk=7, entropy=True, **of), cotangents, x=x, **of)
        for x in (rows.detach(), poisoned)
    )
    for name in clean:
        np.testing.assert_array_equal(clean[name], other[name])
    labels[0, 20] = 31
    value, entropy = token_log_probs(rows.detach(), labels, entropy=True, **of)
    assert np.argwhere(value.isnan().numpy() | entropy.isnan().numpy()).tolist() == [[0, 20]]


def test_logits_of_minus_infinity_leave_entropy_and_gradients_finite():
    logits = torch.tensor([[[0.0, 1.0, -torch.inf]]], dtype=torch.float64, requires_grad=True)
    values = token_log_probs(logits, torch.tensor([[0]]), entropy=True)
    two = logits.detach()[..., :2].requires_grad_()
    same = token_log_probs(two, torch.tensor([[0]]), entropy=True)
    torch.testing.assert_close(values, same)
    (dlogits,), (dtwo,) = (torch.autograd.grad(each[0] + each[1], x) for each, x in ((values, logits), (same, two)))
    torch.testing.assert_close(dlogits, torch.nn.functional.pad(dtwo, (0, 1)))


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


X, W, Y = torch.ones(2, 4, 3), torch.ones(7, 3), torch.ones(2, 4, dtype=torch.long)


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
