"""The loss and the log-probabilities of tokens, in chunks: values and gradients against all logits in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from ring_attn_core.reference.tolerance import relative_error

from ..support.losses import CHUNKS, cotangents_of_tokens, exact_log_probs, exact_loss, hidden_states
from ..support.models import VOCAB, assert_near
from ..support.selection import first, grid, in_each

ONE = [np.ones(())]
HIDDEN = ("loss", "dhidden", "dhead")
OF_HIDDEN, OF_LOGITS = ("logp", "entropy", "dhidden", "dhead"), ("logp", "entropy", "dlogits")


def check_near(got: Any, names: tuple[str, ...], truth: dict[str, np.ndarray], allowed: float = 1e-14) -> None:
    """Assert that results and gradients are those of these names."""
    arrays = [x for each in got for x in each]
    assert_near(dict(zip(names, arrays, strict=True)), {name: truth[name] for name in names}, allowed)


def of_hidden(loss: Any, hidden: Any, head: Any, *, labels: Any, **options: Any) -> Any:
    return loss(hidden, labels, head=head, **options)


def of_logits(loss: Any, hidden: Any, head: Any, *, labels: Any, **options: Any) -> Any:
    return loss(hidden @ head.T, labels, **options)


@in_each(
    "ranks,reduction,chunks",
    jax=first([(1, "mean", CHUNKS), (2, "sum", (7, "logits")), (4, "mean", (7, "logits"))], 2),
    torch=grid([1, 2, 4], ["mean", "sum"], [((*CHUNKS, "logits"),)]),
)
def test_loss_of_hidden_states_in_chunks_is_exact_in_float64(framework, ranks, reduction, chunks):
    hidden, head, labels = hidden_states()
    truth = exact_loss(hidden, head, labels, reduction)
    for chunk in chunks:
        objective, chunk = (of_logits, 7) if chunk == "logits" else (of_hidden, chunk)
        call = partial(objective, framework.loss, chunk=chunk, reduction=reduction)
        check_near(framework.over_ring(ranks, call, [hidden], [head], ONE, labels=labels), HIDDEN, truth)


def accumulated(loss: Any, count: Any, hidden: Any, head: Any, *, labels: Any, **ring: Any) -> Any:
    """The loss of two microbatches, each a row."""
    rows = [(hidden[row : row + 1], labels[row : row + 1]) for row in range(2)]
    total = sum(count(of, **ring) for _, of in rows)
    return sum(loss(x, of, head=head, chunk=7, reduction="sum", **ring) / total for x, of in rows)


def test_accumulated_microbatches_of_uneven_labels_have_the_gradient_of_the_whole_batch(framework):
    hidden, head, labels = hidden_states()
    labels[1, :30] = -100
    truth = exact_loss(hidden, head, labels)
    call = partial(accumulated, framework.loss, framework.count_labels)
    check_near(framework.over_ring(2, call, [hidden], [head], ONE, labels=labels), HIDDEN, truth)
    means = [exact_loss(hidden[row : row + 1], head, labels[row : row + 1])["loss"] for row in range(2)]
    assert abs(np.mean(means) - truth["loss"]) > 1e-3  # the mean of means is another loss


@pytest.mark.parametrize("objective", [of_hidden, of_logits])
def test_a_batch_without_labels_has_a_gradient_of_0_even_if_it_is_divided_by_their_number(framework, objective):
    """So that a step of such batches alone changes no weight, as torch's cross_entropy has it."""
    hidden, head, labels = hidden_states()
    labels, alone = framework.array(np.full_like(labels, -100)), framework.no_ring
    call = lambda *arrays: objective(framework.loss, *arrays, labels=labels, chunk=7, reduction="sum", **alone)
    (value,), gradients = framework.pull(lambda *arrays: call(*arrays) / framework.count_labels(labels, **alone), [hidden, head])
    assert np.isnan(value)
    assert [float(np.abs(x).max()) for x in gradients] == [0, 0]


def in_bfloat16(framework: Any) -> Any:
    """2,048 chunks of a token, of bfloat16 hidden states and weights: a sum in bfloat16 would be off by a third."""
    rng = np.random.default_rng(0)
    hidden, head = (framework.array(rng.standard_normal(shape), "bfloat16") for shape in ((1, 2048, 4), (5, 4)))
    labels = rng.integers(0, 5, (1, 2048)).astype(np.int32)
    return [hidden, head], framework.array(labels), (framework.numpy(hidden), framework.numpy(head), labels)


def test_the_heads_gradient_is_summed_in_float32(framework):
    leaves, labels, arrays = in_bfloat16(framework)
    truth = exact_loss(*arrays, reduction="sum")
    call = partial(of_hidden, framework.loss, labels=labels, chunk=1, reduction="sum", **framework.no_ring)
    (value,), (dhidden, dhead) = framework.pull(call, leaves)
    np.testing.assert_allclose(value, truth["loss"], rtol=1e-6)
    assert relative_error(dhead, truth["dhead"]) <= 2**-8
    assert relative_error(dhidden, truth["dhidden"]) <= 2**-7


def test_log_probs_of_bfloat16_are_float32_and_sum_the_heads_gradient_in_it(framework):
    leaves, labels, arrays = in_bfloat16(framework)
    cotangents = np.random.default_rng(1).standard_normal((2, 1, 2048))
    truth = exact_log_probs(*arrays, *cotangents)
    call = partial(of_hidden, framework.token_log_probs, labels=labels, chunk=1, entropy=True)
    assert {str(x.dtype).removeprefix("torch.") for x in call(*leaves)} == {"float32"}
    got, gradients = framework.pull(call, leaves, cotangents)
    for name, x, allowed in zip(OF_HIDDEN, (*got, *gradients), (1e-6, 1e-6, 2**-7, 2**-7), strict=True):
        assert relative_error(x, truth[name]) <= allowed, name


@pytest.mark.parametrize("given", ["hidden", "logits"])
@pytest.mark.parametrize("of", ["loss", "token_log_probs"])
def test_nan_without_a_label_changes_no_bit_and_a_strange_label_is_nan(framework, of, given):
    hidden, head, labels = hidden_states(np.float32)
    rows, more = (hidden, [head]) if given == "hidden" else (hidden @ head.T, [])
    poisoned = np.where(labels[..., None] == -100, np.float32(np.nan), rows)
    options = framework.no_ring if of == "loss" else {"entropy": True}
    function = partial(getattr(framework, of), chunk=7, **options)
    call = lambda x, head=None: function(x, framework.array(labels), head=head)
    clean, other = (framework.pull(call, [x, *more]) for x in (rows, poisoned))
    for mine, same in zip((*clean[0], *clean[1]), (*other[0], *other[1]), strict=True):
        np.testing.assert_array_equal(mine, same)
    labels[0, 20] = 31
    if of == "token_log_probs":
        strange = np.logical_or(*(np.isnan(framework.numpy(x)) for x in call(*map(framework.array, [rows, *more]))))
        assert np.argwhere(strange).tolist() == [[0, 20]]


IN_CHUNKS = [(7, 0.7), *((chunk, 1.0) for chunk in CHUNKS)]


@in_each("chunk,temperature", jax=first(IN_CHUNKS, 2), torch=IN_CHUNKS)
def test_log_probs_are_exact_in_float64(framework, chunk, temperature):
    (hidden, head, labels), cotangents = hidden_states(), cotangents_of_tokens()
    truth = exact_log_probs(hidden, head / temperature, labels, *cotangents)
    truth |= {name: truth[name] / temperature for name in ("dhead", "dlogits")}
    options: dict[str, Any] = {"labels": framework.array(labels), "chunk": chunk, "temperature": temperature}
    call = partial(of_hidden, framework.token_log_probs, **options, entropy=True)
    check_near(framework.pull(call, [hidden, head], cotangents), OF_HIDDEN, truth)
    of_rows = lambda logits: framework.token_log_probs(logits, **options, entropy=True)
    check_near(framework.pull(of_rows, [hidden @ head.T], cotangents), OF_LOGITS, truth)
    alone = partial(of_hidden, framework.token_log_probs, **options)
    check_near(framework.pull(alone, [hidden, head])[:1], ("logp",), truth)


def test_the_sum_of_log_probs_is_the_loss(framework):
    hidden, head, labels = hidden_states()
    labels = framework.array(labels)
    call = lambda x, head: (
        -framework.token_log_probs(x, labels, head=head, chunk=7).sum(),
        framework.loss(x, labels, head=head, reduction="sum", **framework.no_ring),
    )
    (mine, value), _ = framework.pull(call, [hidden, head])
    np.testing.assert_allclose(mine, value, rtol=1e-14)


def test_logits_of_minus_infinity_leave_entropy_and_gradients_finite(framework):
    labels = framework.array(np.array([[0]]))
    call = lambda logits: framework.token_log_probs(logits, labels, entropy=True)
    three, two = (framework.pull(call, [np.array([[[0.0, 1.0, *more]]])]) for more in ([-np.inf], []))
    np.testing.assert_allclose(three[0], two[0], rtol=1e-6)
    np.testing.assert_allclose(three[1][0], np.pad(two[1][0], ((0, 0), (0, 0), (0, 1))), rtol=1e-6)


def test_loss_of_bfloat16_logits_is_float32_and_a_label_outside_the_vocabulary_raises_or_is_nan(framework):
    logits = framework.array(np.ones((1, 4, VOCAB)), "bfloat16")
    call = lambda *labels: framework.loss(logits, framework.array(np.array([labels])), **framework.no_ring)
    value = call(1, 2, -100, 3)
    assert str(value.dtype).removeprefix("torch.") == "float32"
    np.testing.assert_allclose(value, np.log(VOCAB), rtol=1e-6)
    for wrong in (VOCAB, -1):
        if framework.name == "jax":
            assert np.isnan(call(1, wrong, 2, 3))
            continue
        with pytest.raises(ValueError, match=f"labels hold {wrong}, and a vocabulary of {VOCAB} has 0 to {VOCAB - 1}"):
            call(1, wrong, 2, 3)
