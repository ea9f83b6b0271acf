"""sum_gradients beside one device: parameters that no rank, one rank or every rank uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ring_attn_torch import sum_gradients

USED_BY = {"all": (0, 1, 2), "one": (1,), "none": ()}


def summed(group: Any) -> dict[str, Any]:
    """Return the gradients of a module whose parts some of the ranks use, after their sum."""
    parts = nn.ParameterDict({name: torch.ones(3, dtype=torch.float64) for name in USED_BY})
    parts["frozen"] = nn.Parameter(torch.ones(3), requires_grad=False)
    rank = group.rank() if group else 1
    used = [parts[name] for name, ranks in USED_BY.items() if rank in ranks]
    (torch.stack(used).sum() * (rank + 1)).backward()
    sum_gradients(parts, group)
    return {name: None if p.grad is None else p.grad.tolist() for name, p in parts.items()}


def test_a_gradient_that_every_rank_lacks_stays_none_and_others_are_summed(gloo):
    expected = {"all": [6.0] * 3, "one": [2.0] * 3, "none": None, "frozen": None}
    assert gloo(3, summed) == [expected] * 3


def test_on_one_rank_a_missing_gradient_stays_none():
    assert summed(None) == {"all": [2.0] * 3, "one": [2.0] * 3, "none": None, "frozen": None}


def test_a_sparse_gradient_is_refused_by_name():
    table = nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="the gradient of weight is sparse: make the module with sparse=False"):
        sum_gradients(table)
