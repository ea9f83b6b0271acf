"""The optimizer's part of a checkpoint, function by function: types of settings, first states, and states that go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ring_attn_torch.training import optimizer_states as states

pytest.importorskip("safetensors")


def made(lr: float = 0.1, **settings: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=lr, **settings)


def step(model: Any, optimizer: Any) -> None:
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


SETTINGS = [
    (0.1, 1, True),
    (1, 0.1, True),
    (0.1, True, False),
    (0.1, None, False),
    (0.1, "0.1", False),
    (0.1, [0.1], False),
    (True, False, True),
    (True, None, True),
    (True, 1, False),
    (True, "x", False),
    (None, 0.1, True),
    (None, "x", True),
    ("max", "min", True),
    ("max", 1, False),
    ("max", None, False),
    ((0.9, 0.99), [0.8, 1], True),
    ((0.9, 0.99), [0.8, None], True),
    ((0.9, 0.99), [0.8], False),
    ((0.9, 0.99), [0.8, "x"], False),
    ((0.9, 0.99), 0.8, False),
]


@pytest.mark.parametrize(("own", "saved", "fits"), SETTINGS)
def test_a_setting_is_resumed_only_in_its_type(own: Any, saved: Any, fits: bool):
    model, optimizer = made()
    optimizer.param_groups[0]["more"] = own
    groups = states.groups_of(model, optimizer)
    run = {"optimizer": [groups[0] | {"more": saved}], "optimizer_class": "AdamW"}
    if fits:
        states.check_optimizer(Path("run.json"), run, model, optimizer)
        return
    with pytest.raises(ValueError, match=r"more of group 0 of the optimizer in run\.json is"):
        states.check_optimizer(Path("run.json"), run, model, optimizer)


@pytest.mark.parametrize(
    ("own", "saved", "expected"),
    [((0.9, 0.99), [0.8, 1], (0.8, 1)), ([1], [2], [2]), (None, [1, 2], (1, 2)), (0.1, 0.2, 0.2), (True, None, None)],
)
def test_a_setting_is_restored_as_the_type_that_the_optimizer_has(own: Any, saved: Any, expected: Any):
    _, optimizer = made()
    optimizer.param_groups[0]["more"] = own
    states.set_groups(optimizer, [{"more": saved}])
    assert optimizer.param_groups[0]["more"] == expected
    assert type(optimizer.param_groups[0]["more"]) is type(expected)


def test_parameters_without_a_saved_state_lose_theirs():
    model, optimizer = made()
    step(model, optimizer)
    bias = {"bias": optimizer.state[model.bias]}
    states.set_states(model, optimizer, bias, [])
    assert [*optimizer.state] == [model.bias]
    states.set_states(model, optimizer, bias, ["bias"])
    assert not optimizer.state


class Decaying(torch.optim.AdamW):
    """AdamW that draws a number, and halves its learning rate, a tensor, in place after each step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        torch.rand(1)
        for group in self.param_groups:
            group["lr"].mul_(0.5)


def test_first_states_change_neither_rate_nor_parameter_nor_generator():
    model, _ = made()
    optimizer = Decaying(model.parameters(), lr=torch.tensor(0.25), foreach=False)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1.0)  # wraps step and counts its calls
    before, random = model.weight.detach().clone(), torch.get_rng_state()
    optimizer.register_step_post_hook(lambda *_: pytest.fail("a hook of the user was called"))
    found = states.places_for(model, optimizer, {"weight": {"step", "exp_avg", "exp_avg_sq"}, "gone": {"step"}})
    assert {name: {*each} for name, each in found.items()} == {"weight": {"step", "exp_avg", "exp_avg_sq"}}
    assert float(optimizer.param_groups[0]["lr"]) == 0.25
    assert torch.equal(before, model.weight)
    assert torch.equal(random, torch.get_rng_state())
    assert not getattr(optimizer, "_opt_called", False)
    assert not optimizer.state


def test_states_that_fit_are_filled_in_place():
    model, optimizer = made()
    step(model, optimizer)
    own = optimizer.state[model.weight]
    found = states.places_for(model, optimizer, {"weight": {*own}, "bias": {"step"}})
    assert found["weight"]["exp_avg"] is own["exp_avg"]
    assert found["bias"]["step"] is not optimizer.state[model.bias]["step"]


def test_the_lowest_rank_with_a_state_says_its_kind():
    one, other = {"a": {"step": ["float32", None]}}, {"a": {"step": ["float64", None]}, "b": {"step": ["int64", None]}}
    assert states.union([one, other]) == {"a": {"step": ["float32", None]}, "b": {"step": ["int64", None]}}
    assert states.absent([one, other]) == {"0": ["b"], "1": []}
    assert states.held_states(["optimizer.state.a.b.step", "optimizer.state.a.b.x", "model.a"]) == {"a.b": {"step", "x"}}


def zeros_on_rank(group: Any) -> dict[str, Any]:
    """The dtype and shape of each state that a rank adds to its shards."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    model, optimizer = made()
    model.weight = torch.nn.Parameter(distribute_tensor(model.weight.data, DeviceMesh.from_group(group, "cpu"), [Replicate()]))
    optimizer.param_groups[0]["params"][0] = model.weight
    wanted: states.StateKinds = {"weight": {"exp_avg": ["float64", [2, 3]], "step": ["float32", None]}}
    added = states.with_shards(model, optimizer, {}, wanted)["weight"]
    return {name: (x.dtype, tuple(x.shape)) for name, x in added.items()}


def test_states_that_a_rank_lacks_are_added_in_their_dtype_which_may_not_be_the_parameters(gloo):
    assert gloo(1, zeros_on_rank) == [{"exp_avg": (torch.float64, (2, 3))}]


def test_states_of_parameters_outside_the_model_are_refused():
    model, _ = made()
    other, _ = made()
    optimizer = torch.optim.AdamW([*model.parameters(), *other.parameters()])
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(ValueError, match="states of 2 parameters that are not the model's"):
        states.states_of(model, optimizer)
