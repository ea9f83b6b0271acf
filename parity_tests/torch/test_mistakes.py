"""Users' mistakes with models and checkpoints in PyTorch: one sentence, the same on every rank, and nothing lost."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ring_attn_core.model import checkpoint_folder
from ring_attn_torch import Checkpoints, RingAttention, RingTransformer

from ..support.flushed import unflushed
from ..support.models import TRANSFORMER, VOCAB
from ..support.spawn import PerRank

pytest.importorskip("safetensors")


@pytest.mark.parametrize("token", [VOCAB, -1])
def test_ids_outside_the_vocabulary_are_named(token):
    model = RingTransformer(**TRANSFORMER)
    with pytest.raises(ValueError, match=rf"ids hold {token}, and a vocabulary of {VOCAB} has 0 to {VOCAB - 1}: make the model"):
        model(torch.tensor([[0, token]]))
    assert torch.equal(model(torch.tensor([[0, 1]], dtype=torch.uint8)), model(torch.tensor([[0, 1]])))
    for ids in (torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), torch.ones(2, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"ids must be integers \[batch, tokens\], got torch\."):
            model(ids)


def test_one_ranks_ids_outside_the_vocabulary_are_everybodys_error(gloo):
    gloo.refuse(f"^rank 1: ids hold {VOCAB}", 2, called_on_rank, PerRank(1, VOCAB))


def called_on_rank(group: Any, token: float) -> None:
    RingTransformer(**TRANSFORMER, layout="contiguous", group=group)(torch.full((1, 4), token))


@pytest.mark.parametrize("shape", [(1, 4, 23), (1, 4)])
def test_one_ranks_x_of_another_shape_is_everybodys_error(gloo, shape):
    words = re.escape(f"rank 1: x must be [batch, tokens, 24], got {list(shape)}")
    gloo.refuse(f"^{words}", 2, attends_on_rank, PerRank((1, 4, 24), shape))


def attends_on_rank(group: Any, shape: tuple[int, ...]) -> None:
    RingAttention(24, 4, layout="contiguous", group=group)(torch.ones(shape))


def test_ids_of_one_rank_that_are_not_integers_are_an_error_of_all_ranks(gloo):
    words = r"^rank 1: ids must be integers \[batch, tokens\], got torch.float32 \[1, 4\]"
    gloo.refuse(words, 2, called_on_rank, PerRank(1, 0.5))


@pytest.mark.parametrize("backend", ["flash", "flash4", "cudnn"])
def test_gradients_in_any_order_are_not_called_deterministic(backend):
    for make in (lambda **how: RingAttention(24, 4, **how), lambda **how: RingTransformer(**TRANSFORMER, **how)):
        with pytest.raises(ValueError, match=f"backend='{backend}' adds gradients in any order, so it is not deterministic"):
            make(backend=backend, deterministic=True)


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path):
    model = torch.nn.Linear(3, 2)
    checkpoints = Checkpoints(tmp_path)
    with unflushed() as lost:
        checkpoints.save(1, model)
        checkpoints.close()
    assert checkpoints.steps() == [1]
    assert not lost


@pytest.mark.parametrize("step", [None, "1", 1.5, True, -1])
def test_an_invalid_number_of_steps_is_refused(tmp_path, step):
    with pytest.raises(ValueError, match="step must be an int of at least 0, how many steps the run has made, got"):
        Checkpoints(tmp_path / "run").save(step, torch.nn.Linear(3, 2))
    assert not (tmp_path / "run").exists()


def test_ranks_that_disagree_about_checkpoints_all_say_so(gloo, tmp_path):
    checkpoints = Checkpoints(tmp_path / "a")
    checkpoints.save(3, torch.nn.Linear(3, 2))
    checkpoints.close()
    for outcome in gloo.outcomes(2, resumed_on_rank, PerRank(tmp_path / "a", tmp_path / "b")):
        with pytest.raises(ValueError, match=r"^the newest checkpoint is 3 on rank 0, None on rank 1: all ranks must"):
            raise outcome
    words = "^step is 4 on rank 0, 5 on rank 1: all ranks must make the same calls"
    gloo.refuse(words, 2, saved_on_rank, tmp_path / "a", PerRank(4, 5))
    gloo(2, saved_on_rank, tmp_path / "a", 4)
    assert Checkpoints(tmp_path / "a").steps() == [3, 4]


def resumed_on_rank(group: Any, folder: Path) -> None:
    model = torch.nn.Linear(3, 2)
    before = model.weight.clone()
    try:
        with patch.object(checkpoint_folder, "LAG", 0.2):
            Checkpoints(folder, group=group).resume(model)
    finally:
        assert torch.equal(model.weight, before)


def saved_on_rank(group: Any, folder: Path, step: int) -> None:
    checkpoints = Checkpoints(folder, group=group)
    checkpoints.save(step, torch.nn.Linear(3, 2))
    checkpoints.close()
