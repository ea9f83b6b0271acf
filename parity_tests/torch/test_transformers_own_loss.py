"""A Trainer's own compute_loss and prediction_step run on a ring too, as on one process; losses of logits are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import torch
from transformers import Trainer

import ring_attn_torch.transformers as hf

from .hugging_face_training import Result, Run, trained

pytestmark = pytest.mark.slow
NEAR = 1e-5


class Doubled(Trainer):
    """Twice the loss of transformers' Trainer, with a term of a weight's own, and predictions that are counted."""

    predicted = 0

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch=num_items_in_batch)
        return (2 * loss, outputs) if return_outputs else 2 * loss

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


class RingOfTheModel(hf.RingTraining, OfTheModel):
    pass


class RingOfLogits(hf.RingTraining, OfLogits):
    pass


def near(got: Result, want: Result) -> None:
    worst = {name: float(np.abs(got.weights[name] - x).max() / max(np.abs(x).max(), 1)) for name, x in want.weights.items()}
    assert {name: x for name, x in worst.items() if x > NEAR} == {}
    for ours, theirs in zip(got.logs, want.logs, strict=True):
        assert abs(ours["loss"] - theirs["loss"]) < NEAR
        assert abs(ours["grad_norm"] - theirs["grad_norm"]) < NEAR * max(1, theirs["grad_norm"])


@pytest.mark.parametrize("rings", [1, 2])
def test_the_loss_and_the_predictions_of_the_next_class_are_those_of_one_process(four: Any, tmp_path: Path, rings: int):
    runs = [Run(3, str(tmp_path / f"{rings}{kind}"), ring=4 // rings, rows=2 // rings) for kind in "ab"]
    ones = [Run(3, str(tmp_path / f"one{kind}")) for kind in "ab"]
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


def test_a_loss_of_logits_fails_with_a_note_of_what_they_are(four: Any, tmp_path: Path):
    for note in four(4, of_logits, str(tmp_path)):
        assert "OfLogits.compute_loss ran on a ring of 4 ranks: labels are of whole rows" in note


def of_logits(group: Any, folder: str) -> str:
    with pytest.raises(ValueError, match=r".") as error:
        trained(Run(1, folder), group, RingOfLogits)
    return " ".join(error.value.__notes__)
