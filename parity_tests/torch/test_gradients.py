"""sum_gradients beside one device: parameters that no rank, one rank or every rank uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

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


def test_gradients_summed_before_the_backward_or_twice_are_refused_on_every_rank(gloo):
    early, twice, steps = "no parameter has a gradient on any rank", "no backward has changed them since", [[3.0], [3.0], [3.0]]
    assert gloo(2, mistaken, early, twice) == [steps] * 2


def mistaken(group: Any, early: str, twice: str) -> list[Any]:
    """Make each mistake in turn, and return the gradients of right steps between: zeroed to None, in place, and clipped."""
    layer, rank, right = nn.Linear(1, 1, bias=False), group.rank(), []
    with pytest.raises(ValueError, match=early):
        sum_gradients(layer, group)
    for set_to_none in (True, False, False):
        (layer.weight * (rank + 1)).sum().backward()
        sum_gradients(layer, group)
        right.append(layer.weight.grad.flatten().tolist())  # type: ignore[union-attr]
        with pytest.raises(ValueError, match=twice):
            sum_gradients(layer, group)
        assert layer.weight.grad.flatten().tolist() == right[-1]  # type: ignore[union-attr]
        layer.zero_grad(set_to_none)
    return right


def test_a_backward_that_one_rank_skipped_is_every_ranks_error(gloo):
    outcomes = gloo(3, skipped)
    assert outcomes == [outcomes[0]] * 3
    assert outcomes[0].startswith(
        "the gradients of ranks [1] are summed over ranks [0, 1, 2] already, and no backward has changed"
    )


def skipped(group: Any) -> str:
    """Skip the second backward on rank 1, and return the error."""
    layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(2))
    for step in range(2):
        if step == 0 or group.rank() != 1:
            layers[0](torch.ones(1, 1)).sum().backward()
        if step == 0:
            sum_gradients(layers, group)
    before = [None if p.grad is None else p.grad.clone() for p in layers.parameters()]
    with pytest.raises(ValueError, match="no backward has changed them since") as error:
        sum_gradients(layers, group)
    assert [p.grad for p in layers.parameters()] == before  # the refused call changed nothing
    return str(error.value)


def test_gradients_are_summed_over_two_axes_of_a_mesh_one_after_the_other(gloo):
    assert gloo(4, over_two_axes) == [10.0] * 4


def over_two_axes(group: Any) -> float:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "seq"))
    layer = nn.Linear(1, 1, bias=False)
    (layer.weight * (group.rank() + 1)).sum().backward()
    for axis in ("seq", "dp"):
        sum_gradients(layer, mesh[axis])
    for axis in ("seq", "dp"):
        with pytest.raises(ValueError, match="no backward has changed them since"):
            sum_gradients(layer, mesh[axis])
    return layer.weight.grad.item()  # type: ignore[union-attr]


def test_a_sparse_gradient_is_refused_by_name():
    table = nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="the gradient of weight is sparse: make the module with sparse=False"):
        sum_gradients(table)
