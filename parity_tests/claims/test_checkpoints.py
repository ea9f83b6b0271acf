"""Checkpoints of a run: what is refused before anything is written, what a full disk loses, and what cannot be deleted."""

from __future__ import annotations

import gc
from importlib import import_module
from pathlib import Path
from shutil import rmtree
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from ring_attn_core.model import checkpoint_folder

from ..support.full_disk import full_disk
from ..support.models import TRANSFORMER

pytest.importorskip("orbax.checkpoint")
pytest.importorskip("safetensors")


@pytest.mark.parametrize("keep", [0, True, 1.5])
def test_an_invalid_number_of_checkpoints_is_refused(framework, keep, tmp_path):
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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of tasks that orbax leaves, see below
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_is_told_and_loses_nothing(framework, tmp_path):
    (model, optimizer), checkpoints = framework.trainee(), framework.Checkpoints(tmp_path)
    checkpoints.save(1, model, optimizer)
    checkpoints.wait()
    saved = framework.to_numpy(model)
    framework.from_numpy(model, {name: x + 1 for name, x in saved.items()})
    said = r"of step 2 could not be saved, and those before it are as they were"
    save = lambda: (checkpoints.save(2, model, optimizer), checkpoints.wait())
    with full_disk(100), pytest.raises(OSError, match=said):
        save()
    assert checkpoints.steps() == [1]
    save()
    checkpoints.close()
    assert checkpoints.steps() == [1, 2]
    assert [path.name for path in tmp_path.glob(".*")] == [".lock"]
    rmtree(max(tmp_path.glob("step*")))
    assert framework.Checkpoints(tmp_path).resume(model, optimizer).step == 1
    for name, x in framework.to_numpy(model).items():
        np.testing.assert_array_equal(x, saved[name])
    gc.collect()  # they end here, and not in a later test


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a module"])
def test_a_checkpoint_of_another_transformer_is_refused_by_its_config(framework, inside, tmp_path):
    def make(windows: Any) -> Any:
        model = framework.make("RingTransformer", **TRANSFORMER, windows=windows)
        holds = {"jax": ("flax.nnx", "Dict"), "torch": ("torch.nn", "ModuleDict")}[framework.name]
        return getattr(import_module(holds[0]), holds[1])({"inner": model}) if inside else model

    checkpoints = framework.Checkpoints(tmp_path)
    checkpoints.save(1, make((3, None)))
    with pytest.raises(ValueError, match=r"is of another model: windows is \[3, None\] there and None here\. .*another folder"):
        checkpoints.resume(make(None))
    checkpoints.close()


def test_a_checkpoint_without_an_optimizer_gives_none(framework, tmp_path):
    (model, optimizer), checkpoints = framework.trainee(), framework.Checkpoints(tmp_path)
    checkpoints.save(1, model)
    with pytest.raises(ValueError, match="was saved without an optimizer: resume without one"):
        checkpoints.resume(model, optimizer)
    assert checkpoints.resume(model).step == 1
    checkpoints.close()
