"""A Trainer's own compute_loss and prediction_step run on a ring as on one process; losses of logits are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers", minversion="5.20", reason="RingTrainer needs it")
pytest.importorskip("accelerate")

import torch
from transformers import Trainer, TrainingArguments

import ring_attn_torch.transformers as hf
from ring_attn_core.reference.tolerance import relative_error
from ring_attn_torch import sum_gradients

from .hugging_face import Case, batch, in_float64, make, rounding_of
from .hugging_face_training import Result, Rows, Run, launched, model_of, trained

pytestmark = pytest.mark.slow
NEAR = 1e-5


class Doubled(Trainer):
    """Twice the loss of transformers' Trainer plus a penalty on all weights, and predictions that are counted."""

    predicted = 0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch=num_items_in_batch)
        loss = 2 * loss + 0.01 * squares(model)
        return (loss, outputs) if return_outputs else loss

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        type(self).predicted += 1
        return super().prediction_step(*args, **kwargs)


class OfTheModel(Trainer):
    """The loss of the model, a mean over the labels of a batch, as most compute_loss of users have it."""

    loss_is_scaled_for_ga = False  # of transformers 5.23 and newer; older ones divide by no number of batches

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class OfLogits(Trainer):
    """A loss of logits and labels."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        logits = model(**inputs).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten())


class RingDoubled(hf.RingTraining, Doubled):
    pass


class RingOfTheModel(hf.RingTrainer):
    """The same, where the user's class comes first."""

    loss_is_scaled_for_ga = False
    compute_loss = OfTheModel.compute_loss


class RingOfLogits(hf.RingTraining, OfLogits):
    pass


class RingTrainerOfLogits(hf.RingTrainer):
    compute_loss = OfLogits.compute_loss


def near(got: Result, want: Result) -> None:
    worst = {name: float(np.abs(got.weights[name] - x).max() / max(np.abs(x).max(), 1)) for name, x in want.weights.items()}
    assert {name: x for name, x in worst.items() if x > NEAR} == {}
    for ours, theirs in zip(got.logs, want.logs, strict=True):
        assert abs(ours["loss"] - theirs["loss"]) < NEAR
        assert abs(ours["grad_norm"] - theirs["grad_norm"]) < NEAR * max(1, theirs["grad_norm"])


@pytest.mark.parametrize("rings", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_the_loss_and_the_predictions_of_the_next_class_are_those_of_one_process(four: Any, tmp_path: Path, rings: int):
    runs = [Run(2, str(tmp_path / f"{rings}{kind}"), ring=4 // rings, rows=2 // rings) for kind in "ab"]
    ones = [Run(2, str(tmp_path / f"one{kind}")) for kind in "ab"]
    rows_of = lambda count: {"evaluated": True, "settings": (("per_device_eval_batch_size", count),)}
    doubled = trained(ones[0]._replace(**rows_of(6)), kind=Doubled)
    plain = trained(ones[1], kind=OfTheModel) if rings == 1 else None  # a mean over a batch is another one over two rings
    for got, model, predicted in four(4, on_a_ring, [runs[0]._replace(**rows_of(6 // rings)), runs[1]]):
        near(got, doubled)
        assert abs(got.metrics["eval_loss"] - doubled.metrics["eval_loss"]) < NEAR
        assert predicted > 0
        if plain is not None:
            near(model, plain)


def on_a_ring(group: Any, runs: list[Run]) -> tuple[Result, Result, int]:
    RingDoubled.predicted = 0
    first, second = trained(runs[0], group, RingDoubled), trained(runs[1], group, RingOfTheModel)
    return first, second, RingDoubled.predicted


def test_a_penalty_divided_by_the_ranks_has_the_gradient_of_one_process(four: Any):
    """In a loop of one's own: the recipe of sequence_parallel's docstring."""
    model, given = make("llama"), batch(Case("llama"))
    with in_float64():
        (model(**given).loss + 0.01 * squares(model)).backward()
    for got in four(4, penalized):
        for name, p in model.named_parameters():
            assert relative_error(got[name], p.grad.numpy()) <= rounding_of("llama"), name


def squares(model: Any) -> Any:
    return sum(p.square().sum() for p in model.parameters())


def penalized(group: Any) -> dict[str, np.ndarray]:
    torch.set_grad_enabled(True)
    model = make("llama")
    with in_float64(), hf.sequence_parallel(model, group):
        (model(**batch(Case("llama"))).loss + 0.01 * squares(model) / group.size()).backward()
    sum_gradients(model, group)
    return {name: p.grad.numpy() for name, p in model.named_parameters()}


@pytest.mark.exhaustive
def test_a_loss_of_logits_fails_with_a_note_of_what_they_are(four: Any, tmp_path: Path):
    words = ".compute_loss ran on a ring of 4 ranks: labels are of whole rows, and the model's logits are this rank's shard"
    for of_next, of_own, of_none in four(4, of_logits, str(tmp_path)):
        assert f"OfLogits{words}" in of_next
        assert f"RingTrainerOfLogits{words}" in of_own
        assert "or None with loss_chunk" in of_none


def of_logits(group: Any, folder: str) -> list[str]:
    notes, run = [], Run(1, folder)
    kinds = (RingOfLogits, RingTrainerOfLogits, RingOfLogits)
    for kind, chunk in zip(kinds, (None, None, 5), strict=True):
        with pytest.raises((ValueError, AttributeError), match=r".") as error:
            trained(run._replace(trainer=(("loss_chunk", chunk),)), group, kind)
        notes.append(" ".join(error.value.__notes__))
    return notes


def test_an_evaluation_of_weights_that_differ_between_ranks_is_refused(four: Any, tmp_path: Path):
    for message in four(4, evaluated_apart, str(tmp_path)):
        assert "rank 3 of all ranks holds another model.norm.weight than rank 0" in message


def evaluated_apart(group: Any, folder: str) -> str:
    with launched(group.rank(), group.size()):
        model = model_of(Run(1, folder))
        model.model.norm.weight.data[0] += group.rank() == 3
        arguments = TrainingArguments(folder, use_cpu=True, report_to=[], disable_tqdm=True)
        trainer = hf.RingTrainer(model=model, args=arguments, eval_dataset=Rows())
        with pytest.raises(ValueError, match="holds another") as error:
            trainer.evaluate()
        return str(error.value)
