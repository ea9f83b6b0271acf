"""Hybrid models of transformers on a GPU, one rank and two that share it: loss, gradients and new tokens of one process."""

from __future__ import annotations

import pytest
import torch

from ..support.spawn import Ranks

pytest.importorskip("transformers", minversion="5.23", reason="its hybrid models generate over a ring")

from ..torch import test_transformers_hybrids as models
from ..torch import test_transformers_hybrids_generate as texts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def gloo():
    pool = Ranks("gloo", 2)
    yield pool
    pool.close()


def test_models_have_the_loss_and_gradients_of_one_process(gloo):
    (outcomes,) = gloo(1, models.over_a_ring, models.FEW, "cuda")
    for case, got in zip(models.FEW, outcomes, strict=True):
        models.compare(got, case, "cuda")


@pytest.mark.parametrize("ranks", [1, 2])
def test_models_generate_the_logits_of_one_process(gloo, ranks):
    """By "gather": gloo sends no tensor of a GPU from rank to rank, and gathers them."""
    for outcomes in gloo(ranks, texts.over_a_ring, texts.FEW, "cuda", "gather"):
        for case, got in zip(texts.FEW, outcomes, strict=True):
            texts.check(got, case, "cuda")
