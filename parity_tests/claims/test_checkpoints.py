"""Checkpoints of a run: what is refused before anything is written, and what cannot be deleted."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest

from ring_attn_core.model import checkpoint_folder

pytest.importorskip("orbax.checkpoint")
pytest.importorskip("safetensors")


@pytest.mark.parametrize("keep", [0, True, 1.5])
def test_a_number_of_checkpoints_that_is_none_is_refused(framework, keep, tmp_path):
    with pytest.raises(ValueError, match="keep must be an int of at least 1"):
        framework.Checkpoints(tmp_path, keep=keep)


def test_bad_arguments_are_refused_before_anything_is_written(framework, tmp_path):
    model, optimizer = framework.trainee()
    checkpoints = framework.Checkpoints(tmp_path / "run")
    for step, given, message in (
        (-1, {}, "step must be an int of at least 0"),
        (1, {"data": {"batch": 1}}, "data must be the text that the dataset's"),
        (1, {"more": {"x": framework.array([1.0])}}, "more must be a dict that JSON can hold"),
    ):
        with pytest.raises(ValueError, match=message):
            checkpoints.save(step, model, optimizer, **given)
    assert not (tmp_path / "run").exists()
    checkpoints.save(3, model, optimizer)
    with pytest.raises(ValueError, match="step 3 is not after step 3, of which"):
        checkpoints.save(3, model, optimizer)
    checkpoints.close()


def test_an_old_checkpoint_that_cannot_be_deleted_is_a_warning(framework, tmp_path):
    def busy(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError(16, "Device or resource busy")

    model, optimizer = framework.trainee()
    checkpoints = framework.Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, model, optimizer)
    checkpoints.wait()
    with patch.object(checkpoint_folder, "rmtree", busy):
        checkpoints.save(2, model, optimizer)
        with pytest.warns(UserWarning, match=r"step[-_]0*1 could not be deleted: .*busy\. The newest checkpoint is whole"):
            checkpoints.wait()
    assert checkpoints.steps() == [2]
    checkpoints.close()  # and no other warning, which would be an error


def test_closed_or_second_checkpoints_are_refused(framework, tmp_path):
    (first, second), (model, _) = (framework.Checkpoints(tmp_path) for _ in range(2)), framework.trainee()
    first.save(1, model)
    with pytest.raises(ValueError, match=r"is in use: other Checkpoints of this process save there\. close\(\) them first, or"):
        second.save(2, model)
    first.close()
    first.close()
    with pytest.raises(ValueError, match=r"these Checkpoints of .* are closed: make new ones to save"):
        first.save(2, model)
    second.save(2, model)
    second.close()
    assert first.steps() == [1, 2]


def test_a_checkpoint_without_an_optimizer_gives_none(framework, tmp_path):
    (model, optimizer), checkpoints = framework.trainee(), framework.Checkpoints(tmp_path)
    checkpoints.save(1, model)
    with pytest.raises(ValueError, match="was saved without an optimizer: resume without one"):
        checkpoints.resume(model, optimizer)
    assert checkpoints.resume(model).step == 1
    checkpoints.close()
