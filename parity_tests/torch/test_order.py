"""``order="global"`` of PyTorch: kept by torch.compile, and compared between ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ring_attn_torch import ring_attention

from ..support import warm
from ..support.cases import Case
from ..support.programs import environment
from ..support.spawn import PerRank
from .ring import on_rank
from .test_strategies import under_compile


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_compiled_call_keeps_the_order(gloo, ranks):
    case = Case(order="global", sinks=True, extents="documents", ranks=ranks)
    inputs = [PerRank(*x) for x in case.inputs()]
    for compiled, eager in zip(gloo(ranks, under_compile, case, *inputs), gloo(ranks, on_rank, case, *inputs), strict=True):
        for a, b in zip(compiled, eager, strict=True):
            assert a.tobytes() == b.tobytes()


def other_orders(group, *arguments):
    q = torch.randn(1, 8, 2, 4)
    return ring_attention(q, q, q, group=group, order=arguments[0])


def test_ranks_with_other_orders_are_told_so(gloo):
    gloo.refuse("disagree on order: 'ring' on rank 0, 'global' on rank 1", 2, other_orders, PerRank("ring", "global"))


@pytest.mark.exhaustive
def test_training_and_log_probabilities_of_a_model_have_the_same_bits_on_1_2_and_4_ranks(tmp_path):
    program = [str(Path(__file__).parents[2] / "examples" / "torch_same_bits.py")]
    one, *others = (warm.run(program, "torch", tmp_path, environment(), processes=ranks) for ranks in (1, 2, 4))
    assert one.count("step") == 3 and others == [one, one]
    trainer, generator = re.findall(r"(?:trainer|generator) (\w+)", one)
    assert trainer == generator
