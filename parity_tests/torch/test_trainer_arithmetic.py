"""Tests of a Trainer's products, quotients and counts by the ranks of a ring, without a ring."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ring_attn_torch.transformers.trainer import RingTraining

pytest.importorskip("accelerate")


def stub(**more: Any) -> Any:
    """A rank of three rings of two."""
    return SimpleNamespace(args=SimpleNamespace(world_size=6), ring=SimpleNamespace(ranks=2), **more)


def test_every_row_of_all_rings_comes_once_and_what_fills_the_last_batch_not_at_all():
    state = SimpleNamespace(end_of_dataloader=False, remainder=5)
    everybody = torch.tensor([0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5])
    trainer = stub(accelerator=SimpleNamespace(gradient_state=state, gather=lambda _: everybody))
    assert RingTraining._gather_rows(trainer, everybody[:2]).tolist() == [0, 1, 2, 3, 4, 5]
    state.end_of_dataloader = True
    assert RingTraining._gather_rows(trainer, everybody[:2]).tolist() == [0, 1, 2, 3, 4]
