"""Schedules have the rates of optax's and torch's of the same name at every step, alone and in a list."""

from __future__ import annotations

import random
from typing import Any

import pytest

from ring_attn_cli.train.arithmetic import rates
from ring_attn_cli.train.config import Optimizer
from ring_attn_cli.train.schedules import ALL, NEEDED, PEAK, SCHEDULES, schedule

PEAK_RATE, STEPS = 0.3, 40
TORCH = [name for name in SCHEDULES if name[0].isupper()]
OPTAX = [name for name in SCHEDULES if not name[0].isupper()]


def drawn(name: str, rng: random.Random) -> dict[str, Any]:
    """Draw arguments of a schedule; some of those with a default are left out."""
    known = SCHEDULES[name].arguments
    values: dict[str, Any] = {
        "milestones": sorted(rng.sample(range(1, STEPS), 3)),
        "boundaries_and_scales": {str(step): rng.choice([0.5, 0.1, 2.0]) for step in rng.sample(range(1, STEPS), 3)},
        "transition_begin": rng.randrange(6),
        "warmup_steps": rng.randrange(1, 9),
        "T_mult": rng.randrange(1, 4),
        "anneal_strategy": rng.choice(["cos", "linear"]),
        "power": rng.choice([0.5, 1.0, 2.0]),
        "exponent": rng.choice([1.0, 1.5]),
        "decay_rate": rng.choice([0.5, 0.9, 1.1]),
        "gamma": rng.choice([0.1, 0.9]),
        "pct_start": rng.uniform(0.15, 0.4),
        "pct_final": rng.uniform(0.6, 0.9),
        "div_factor": rng.uniform(2, 30),
        "final_div_factor": rng.uniform(2, 1e4),
        "factor": rng.choice([0.1, 0.4, 1.0]),
        "start_factor": rng.choice([0.1, 0.7, 1.0]),
        "end_factor": rng.choice([0.0, 0.5, 1.0]),
        "alpha": rng.uniform(0, 0.5),
        "eta_min": rng.uniform(0, 0.05),
        "end_value": rng.uniform(0.001, 0.1),
        "init_value": rng.uniform(0.1, 0.5),
        "peak_value": rng.uniform(0.2, 0.5),
        "max_lr": rng.uniform(0.2, 0.5),
        "value": rng.uniform(0.1, 0.5),
        "staircase": rng.random() < 0.5,
        "three_phase": rng.random() < 0.5,
    }
    counts = {key: rng.randrange(10, STEPS) for key in known if key not in values}
    return {key: (values | counts)[key] for key, (_, default) in known.items() if default is NEEDED or rng.random() < 0.7}


def in_optax(name: str, arguments: dict[str, Any], steps: int = STEPS) -> list[float]:
    import jax
    import jax.numpy as jnp
    import optax

    given = {}
    for key, (_, default) in SCHEDULES[name].arguments.items():
        given[key] = arguments.get(key, PEAK_RATE if default is PEAK else steps if default is ALL else default)
    if "boundaries_and_scales" in given:
        given["boundaries_and_scales"] = {int(step): scale for step, scale in given["boundaries_and_scales"].items()}
    with jax.enable_x64(True):
        made = getattr(optax, name)(**given)
        return [float(rate) for rate in jax.jit(jax.vmap(lambda step: jnp.asarray(made(step))))(jnp.arange(steps))]


def in_torch(tables: list[dict[str, Any]], steps: int = STEPS) -> list[float]:
    import torch
    from torch.optim import lr_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], PEAK_RATE)
    made, milestones, begin = [], [], 0
    for table in tables:
        until = table.get("until", steps)
        given = {key: value for key, value in table.items() if key not in ("name", "until")}
        for key, (_, default) in SCHEDULES[table["name"]].arguments.items():
            if key not in given and default in (PEAK, ALL):
                given[key] = PEAK_RATE if default is PEAK else until - begin
        if table["name"] == "OneCycleLR":
            given["cycle_momentum"] = False
        made.append(getattr(lr_scheduler, table["name"])(optimizer, **given))
        milestones.append(until)
        begin = until
    of = made[0] if len(made) == 1 else lr_scheduler.SequentialLR(optimizer, made, milestones[:-1])
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        of.step()
    return found


def ours(tables: list[dict[str, Any]], steps: int = STEPS) -> list[float]:
    made = schedule(tables, PEAK_RATE, steps)
    return [made(step) for step in range(steps)]


@pytest.mark.parametrize("name", OPTAX)
def test_schedules_by_optax_names_have_its_rates(name: str):
    pytest.importorskip("optax")
    for seed in range(2):
        arguments = drawn(name, random.Random(f"{name} {seed}"))
        expected = in_optax(name, arguments)
        assert ours([{"name": name, **arguments}]) == pytest.approx(expected, rel=1e-9, abs=1e-12), arguments


@pytest.mark.parametrize("name", ["warmup_cosine_decay_schedule", "warmup_exponential_decay_schedule"])
def test_a_schedule_without_a_warmup_begins_at_its_peak(name: str):
    pytest.importorskip("optax")
    arguments = {"warmup_steps": 0} | ({"decay_rate": 0.5} if "exponential" in name else {})
    expected = in_optax(name, arguments)
    assert expected[0] == PEAK_RATE
    assert ours([{"name": name, **arguments}]) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", TORCH)
def test_schedules_by_torch_names_have_its_rates(name: str):
    pytest.importorskip("torch")
    for seed in range(20):
        table = {"name": name, **drawn(name, random.Random(f"{name} {seed}"))}
        expected = in_torch([table], table.get("total_steps", STEPS))
        assert ours([table], len(expected)) == pytest.approx(expected, rel=1e-9, abs=1e-12), table


def test_schedules_in_a_list_have_the_rates_of_sequential():
    pytest.importorskip("torch")
    warm = {"name": "LinearLR", "start_factor": 0.1, "total_iters": 8, "until": 8}
    for then in ({"name": "CosineAnnealingLR", "eta_min": 0.01}, {"name": "StepLR", "step_size": 7, "gamma": 0.5}):
        assert ours([warm, then]) == pytest.approx(in_torch([warm, then]), rel=1e-9)
    assert rates(Optimizer(learning_rate=PEAK_RATE, schedule=(warm, then)), STEPS) == ours([warm, then])


MISTAKES = [
    ([{"name": "CosineLR"}], "no schedule is called 'CosineLR': did you mean 'CosineAnnealingLR'"),
    ([{"T_max": 3}], "no schedule is called None: there are constant_schedule"),
    ([{"name": "StepLR", "steps": 3}], "StepLR has no argument 'steps': did you mean 'step_size'"),
    ([{"name": "StepLR"}], "StepLR needs step_size, a number of steps, at least 1"),
    ([{"name": "StepLR", "step_size": 0}], "step_size of StepLR must be a number of steps, at least 1, got 0"),
    ([{"name": "MultiStepLR", "milestones": 3}], "milestones of MultiStepLR must be a list of steps, got 3"),
    ([{"name": "LinearLR", "start_factor": 2.0}], "start_factor of LinearLR must be a number of more than 0, at most 1, got 2.0"),
    ([{"name": "OneCycleLR", "total_steps": 39}], "OneCycleLR: total_steps is 39, but it has to last 40 steps: pass as many or"),
    ([{"name": "OneCycleLR", "anneal_strategy": "cosine"}], "anneal_strategy of OneCycleLR must be 'cos' or 'linear'"),
    ([{"name": "constant_schedule", "value": -1.0}], "value of constant_schedule must be a number of at least 0, got -1.0"),
    (
        [{"name": "warmup_cosine_decay_schedule", "warmup_steps": 9, "decay_steps": 9}],
        "warmup_cosine_decay_schedule: decay_steps counts the warmup too, so it must be more than 9, got 9",
    ),
    ([{"name": "ConstantLR"}, {"name": "ConstantLR"}], "every schedule but the last has until.*number 1 of 2 has none"),
    ([{"name": "ExponentialLR", "gamma": 1e20}], "optimizer.schedule: ExponentialLR: the rate grows too large for a number"),
    ([{"name": "ConstantLR", "until": 3}], "every schedule but the last has until.*number 1 of 1 has one"),
    ([{"name": "ConstantLR", "until": 0}, {"name": "ConstantLR"}], "until must be a step after 0, got 0"),
]


@pytest.mark.parametrize(("tables", "words"), MISTAKES)
def test_an_invalid_schedule_is_refused(tables: list[dict[str, Any]], words: str):
    with pytest.raises(ValueError, match=words):
        schedule(tables, PEAK_RATE, STEPS)
