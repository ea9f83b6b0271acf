"""RingTrainer trains as transformers' Trainer on one process does: weights, losses, norms, metrics, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from .hugging_face_training import ROWS, TOKENS, Result, Rows, Run, all_trained, trained

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow]
NEAR = 1e-5
"""How far a run may be from one process: a bound that is asked for, since a rounding grows with every step of Adam."""


def near(got: Result, want: Result) -> None:
    """Weights relative to the largest of their tensor, losses and norms as they are."""
    assert got.weights.keys() == want.weights.keys()
    assert len(got.logs) == len(want.logs) > 0
    worst = {name: float(np.abs(got.weights[name] - x).max() / max(np.abs(x).max(), 1)) for name, x in want.weights.items()}
    assert {name: x for name, x in worst.items() if x > NEAR} == {}
    for ours, theirs in zip(got.logs, want.logs, strict=True):
        assert abs(ours["loss"] - theirs["loss"]) < NEAR
        assert abs(ours["grad_norm"] - theirs["grad_norm"]) < NEAR * max(1, theirs["grad_norm"])


@pytest.mark.parametrize("steps", [12, pytest.param(50, marks=pytest.mark.full)])
def test_four_ranks_train_evaluate_predict_and_resume_as_one_process(four: Any, tmp_path: Path, steps: int):
    """Uneven labels, packed rows, two batches in a step; a run that is killed goes on from its checkpoint to the bit."""
    one = trained(Run(steps, str(tmp_path / "one"), evaluated=True))
    saving = (("save_strategy", "steps"), ("save_steps", 4))
    folder = str(tmp_path / "killed")
    runs = [
        Run(steps, str(tmp_path / "four"), evaluated=True),
        Run(steps, folder, settings=saving, killed_after=6),
        Run(steps, folder, settings=saving, resumed=True),
    ]
    for got, _, resumed in four(4, all_trained, runs):
        near(got, one)
        assert got.metrics["eval_accuracy"] == one.metrics["eval_accuracy"]
        assert abs(got.metrics["eval_loss"] - one.metrics["eval_loss"]) < NEAR
        assert got.logits is not None
        assert one.logits is not None
        assert got.logits.shape == (ROWS, TOKENS, one.logits.shape[-1])
        assert np.abs(got.logits - one.logits).max() < 10 * NEAR * np.abs(one.logits).max()
        assert np.array_equal(got.labels, np.stack([Rows()[row]["labels"] for row in range(ROWS)]))
        assert len(resumed.logs) == steps
        near(resumed, got)
        print(
            "XXX",
            max(np.abs(resumed.weights[name] - x).max() for name, x in got.weights.items()),
            max(np.abs(one.weights[name] - x).max() for name, x in got.weights.items()),
        )
