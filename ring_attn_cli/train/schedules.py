"""Learning-rate schedules under the names that optax and torch.optim.lr_scheduler give them, with the same arguments.

The rates of a training run are computed here, in float64, for PyTorch and for JAX. A test compares each schedule with the
original. A ``Schedule`` has arguments, and a function that computes the rate from their values and a step (0, 1, ...).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple


class Kind(NamedTuple):
    """A type of a schedule's arguments: its description in an error (``words``), and a test of a value (``fits``)."""

    words: str
    fits: Callable[[Any], bool]


class Argument(NamedTuple):
    kind: Kind
    default: Any


def _number(x: Any) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def _count(x: Any, least: int) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= least


def _step_list(x: Any) -> bool:
    return isinstance(x, list | tuple) and all(_count(each, 0) for each in x)


def _scales(x: Any) -> bool:
    return isinstance(x, Mapping) and all(str(key).isdecimal() and _number(value) and value >= 0 for key, value in x.items())


NUMBER = Kind("a number", _number)
RATE = Kind("a number of at least 0", lambda x: _number(x) and x >= 0)
PART = Kind("a number between 0 and 1", lambda x: _number(x) and 0 < x < 1)
FACTOR = Kind("a number from 0 to 1", lambda x: _number(x) and 0 <= x <= 1)
START = Kind("a number of more than 0, at most 1", lambda x: _number(x) and 0 < x <= 1)
POSITIVE = Kind("a number of more than 0", lambda x: _number(x) and x > 0)
STEPS = Kind("a number of steps, at least 1", lambda x: _count(x, 1))
WARMUP = Kind("a number of steps, at least 0", lambda x: _count(x, 0))
BEGIN = Kind("a step, at least 0", lambda x: _count(x, 0))
SWITCH = Kind("true or false", lambda x: isinstance(x, bool))

NEEDED, PEAK, ALL, NONE = object(), object(), object(), None
"""Markers in place of an argument's default.

NEEDED: the argument must be passed. PEAK: the default is ``optimizer.learning_rate``. ALL: the default is the number of the
schedule's steps. NONE: the argument stays unset.
"""

Rate = Callable[[SimpleNamespace, int], float]
"""A function of a schedule's arguments and a step, which returns the learning rate."""


class Schedule(NamedTuple):
    arguments: dict[str, Argument]
    rate: Rate


def _polynomial(a: SimpleNamespace, t: int) -> float:
    left = 1 - min(max(t - a.transition_begin, 0), a.transition_steps) / a.transition_steps
    return (a.init_value - a.end_value) * left**a.power + a.end_value


def _exponential(a: SimpleNamespace, t: int) -> float:
    passed = t - a.transition_begin
    power = passed // a.transition_steps if a.staircase else passed / a.transition_steps
    rate = a.init_value if passed <= 0 else a.init_value * a.decay_rate**power
    return rate if a.end_value is None else (max if a.decay_rate < 1 else min)(rate, a.end_value)


def _cosine_decay(a: SimpleNamespace, t: int) -> float:
    falling = (0.5 * (1 + math.cos(math.pi * min(t, a.decay_steps) / a.decay_steps))) ** a.exponent
    return a.init_value * ((1 - a.alpha) * falling + a.alpha)


def _after_warmup(then: Callable[[SimpleNamespace], Rate]) -> Rate:
    """Return a linear warmup from ``init_value`` to ``peak_value``, then the schedule of ``then(arguments)`` from the peak."""

    def rate(a: SimpleNamespace, t: int) -> float:
        if t < a.warmup_steps:
            return a.init_value + (a.peak_value - a.init_value) * t / a.warmup_steps
        return then(a)(SimpleNamespace(**vars(a) | {"init_value": a.peak_value}), t - a.warmup_steps)

    return rate


def _warm_cosine(a: SimpleNamespace) -> Rate:
    if a.decay_steps <= a.warmup_steps:
        raise ValueError(f"decay_steps counts the warmup too, so it must be more than {a.warmup_steps}, got {a.decay_steps}")
    alpha = 0.0 if a.peak_value == 0 else a.end_value / a.peak_value
    more = {"decay_steps": a.decay_steps - a.warmup_steps, "alpha": alpha}
    return lambda b, t: _cosine_decay(SimpleNamespace(**vars(b) | more), t)


def _piecewise(a: SimpleNamespace, t: int) -> float:
    return a.init_value * math.prod(scale for step, scale in a.boundaries_and_scales.items() if t >= int(step))


def _interpolated(points: Sequence[tuple[float, float]], t: float, cosine: bool) -> float:
    """Interpolate the rate at step ``t`` between points (step, rate), linearly or by half a cosine; then keep the last rate."""
    for (begin, first), (end, last) in pairwise(points):
        if begin <= t < end:
            part = (t - begin) / (end - begin)
            return last + (first - last) / 2 * (math.cos(math.pi * part) + 1) if cosine else first + (last - first) * part
    return points[-1][1]


def _one_cycle(a: SimpleNamespace, t: int) -> float:
    """Return the rate of optax's one-cycle schedules: linear in three phases if ``a`` has ``pct_final``, else cosine in two."""
    low, n = a.peak_value / a.div_factor, a.transition_steps
    middle = [] if not hasattr(a, "pct_final") else [(int(a.pct_final * n), low)]
    points = [(0, low), (int(a.pct_start * n), a.peak_value), *middle, (n, low / a.final_div_factor)]
    return _interpolated(points, t, cosine=not middle)


def _torch_one_cycle(a: SimpleNamespace, t: int) -> float:
    low, n = a.max_lr / a.div_factor, a.total_steps
    if t > n:
        raise ValueError(f"total_steps is {n}, but it has to last {t} steps: pass as many or more, or end it by until")
    back = [(2 * a.pct_start * n - 2, low)] if a.three_phase else []
    points = [(0, low), (a.pct_start * n - 1, a.max_lr), *back, (n - 1, low / a.final_div_factor)]
    return _interpolated(points, t, cosine=a.anneal_strategy == "cos")


def _cosine_annealing(a: SimpleNamespace, t: float, period: int) -> float:
    return a.eta_min + (a.base - a.eta_min) * (1 + math.cos(math.pi * t / period)) / 2


def _warm_restarts(a: SimpleNamespace, t: int) -> float:
    period = a.T_0
    while t >= period:
        t, period = t - period, period * a.T_mult
    return _cosine_annealing(a, t, period)


def _arguments(**kinds: tuple[Kind, Any]) -> dict[str, Argument]:
    return {name: Argument(*each) for name, each in kinds.items()}


_FROM, _TO, _OVER = {"init_value": (RATE, PEAK)}, {"end_value": (RATE, NEEDED)}, {"transition_steps": (STEPS, ALL)}
_LATE, _EXPONENT = {"transition_begin": (BEGIN, 0)}, {"exponent": (RATE, 1.0)}
_WARM = {"init_value": (RATE, 0.0), "peak_value": (RATE, PEAK), "warmup_steps": (WARMUP, NEEDED)}
_DECAY = {"decay_rate": (POSITIVE, NEEDED), **_LATE, "staircase": (SWITCH, False), "end_value": (RATE, NONE)}
_CYCLE = {"pct_start": (PART, 0.3), "div_factor": (POSITIVE, 25.0), "final_div_factor": (POSITIVE, 1e4)}
_TOTAL, _GAMMA = {"total_iters": (STEPS, 5)}, {"gamma": (RATE, 0.1)}
_ANNEAL = Kind("'cos' or 'linear'", lambda x: x in ("cos", "linear"))

SCHEDULES: dict[str, Schedule] = {
    name: Schedule(_arguments(**arguments), rate)
    for name, arguments, rate in [
        # optax
        ("constant_schedule", {"value": (RATE, PEAK)}, lambda a, t: a.value),
        ("linear_schedule", _FROM | _TO | _OVER | _LATE, lambda a, t: _polynomial(SimpleNamespace(**vars(a), power=1), t)),
        ("polynomial_schedule", _FROM | _TO | {"power": (RATE, NEEDED)} | _OVER | _LATE, _polynomial),
        ("exponential_decay", _FROM | _OVER | _DECAY, _exponential),
        ("cosine_decay_schedule", _FROM | {"decay_steps": (STEPS, ALL), "alpha": (RATE, 0.0)} | _EXPONENT, _cosine_decay),
        ("piecewise_constant_schedule", _FROM | {"boundaries_and_scales": (Kind("a table of steps", _scales), {})}, _piecewise),
        (
            "warmup_constant_schedule",
            _WARM | {"warmup_steps": (STEPS, NEEDED)},  # with 0 optax stays at init_value
            _after_warmup(lambda a: lambda b, t: b.init_value),
        ),
        (
            "warmup_cosine_decay_schedule",
            _WARM | {"decay_steps": (STEPS, ALL), "end_value": (RATE, 0.0)} | _EXPONENT,
            _after_warmup(_warm_cosine),
        ),
        ("warmup_exponential_decay_schedule", _WARM | _OVER | _DECAY, _after_warmup(lambda a: _exponential)),
        ("cosine_onecycle_schedule", _OVER | {"peak_value": (RATE, PEAK)} | _CYCLE, _one_cycle),
        ("linear_onecycle_schedule", _OVER | {"peak_value": (RATE, PEAK)} | _CYCLE | {"pct_final": (PART, 0.85)}, _one_cycle),
        # torch.optim.lr_scheduler, with optimizer.learning_rate as the optimizer's rate
        ("ConstantLR", {"factor": (START, 1 / 3)} | _TOTAL, lambda a, t: a.base * (a.factor if t < a.total_iters else 1)),
        (
            "LinearLR",
            {"start_factor": (START, 1 / 3), "end_factor": (FACTOR, 1.0)} | _TOTAL,
            lambda a, t: a.base * (a.start_factor + (a.end_factor - a.start_factor) * min(t, a.total_iters) / a.total_iters),
        ),
        ("ExponentialLR", {"gamma": (RATE, NEEDED)}, lambda a, t: a.base * a.gamma**t),
        ("StepLR", {"step_size": (STEPS, NEEDED)} | _GAMMA, lambda a, t: a.base * a.gamma ** (t // a.step_size)),
        (
            "MultiStepLR",
            {"milestones": (Kind("a list of steps", _step_list), NEEDED)} | _GAMMA,
            lambda a, t: a.base * a.gamma ** sum(t >= each for each in a.milestones),
        ),
        (
            "PolynomialLR",
            _TOTAL | {"power": (RATE, 1.0)},
            lambda a, t: a.base * (1 - min(t, a.total_iters) / a.total_iters) ** a.power,
        ),
        (
            "CosineAnnealingLR",
            {"T_max": (STEPS, ALL), "eta_min": (RATE, 0.0)},
            lambda a, t: _cosine_annealing(a, t, a.T_max),
        ),
        ("CosineAnnealingWarmRestarts", {"T_0": (STEPS, NEEDED), "T_mult": (STEPS, 1), "eta_min": (RATE, 0.0)}, _warm_restarts),
        (
            "OneCycleLR",
            {"max_lr": (RATE, PEAK), "total_steps": (STEPS, ALL), "anneal_strategy": (_ANNEAL, "cos")}
            | _CYCLE
            | {"three_phase": (SWITCH, False)},
            _torch_one_cycle,
        ),
    ]
}
"""The supported schedules by name, first of optax, then of torch."""


def schedule(tables: Sequence[Mapping[str, Any]], peak: float, steps: int) -> Callable[[int], float]:
    """Return a function that maps a step (0, 1, ...) to the learning rate, for a sequence of schedules.
    ``until``: the next table's first step; each counts its own from 0, as in ``optax.join_schedules`` and ``SequentialLR``.
    ``peak``: the default initial or peak rate, and the base rate of torch's schedules."""
    parts: list[tuple[int, Callable[[int], float]]] = []
    begin = 0
    for number, table in enumerate(tables):
        last = number == len(tables) - 1
        if last == ("until" in table):
            raise ValueError(
                "optimizer.schedule: every schedule but the last has until, the step at which the next begins; "
                f"number {number + 1} of {len(tables)} has {'one' if last else 'none'}"
            )
        end = steps if last else table["until"]
        if not last and not _count(end, begin + 1):
            raise ValueError(f"optimizer.schedule: until must be a step after {begin}, got {end!r}")
        parts.append((begin, _part(table, peak, max(1, end - begin))))
        begin = end

    def rate(step: int) -> float:
        first, part = next((first, part) for first, part in reversed(parts) if step >= first)
        return float(part(step - first))

    return rate


def _part(table: Mapping[str, Any], peak: float, steps: int) -> Callable[[int], float]:
    """Return one schedule as a function from its step (0, 1, ...) to the learning rate. Raise ValueError if it is invalid."""
    arguments = {key: value for key, value in table.items() if key not in ("name", "until")}
    name = table.get("name")
    if not isinstance(name, str) or name not in SCHEDULES:
        near = get_close_matches(str(name), SCHEDULES, 1, 0.4)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"optimizer.schedule: no schedule is called {name!r}: {meant}there are {', '.join(SCHEDULES)}")
    known, rate = SCHEDULES[name]
    for key in arguments:
        if key not in known:
            near = get_close_matches(key, known, 1, 0.4)
            meant = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"optimizer.schedule: {name} has no argument {key!r}: {meant}it has {', '.join(known)}")
    values: dict[str, Any] = {"base": peak}
    for key, (kind, default) in known.items():
        value = arguments.get(key, peak if default is PEAK else steps if default is ALL else default)
        if value is NEEDED:
            raise ValueError(f"optimizer.schedule: {name} needs {key}, {kind.words}")
        if key in arguments and not kind.fits(value):
            raise ValueError(f"optimizer.schedule: {key} of {name} must be {kind.words}, got {value!r}")
        values[key] = value
    found = SimpleNamespace(**values)
    try:
        rate(found, steps)
    except OverflowError:
        raise ValueError(f"optimizer.schedule: {name}: the rate grows too large for a number: make its factor smaller") from None
    except ValueError as error:  # arguments that do not fit each other
        raise ValueError(f"optimizer.schedule: {name}: {error}") from error
    return lambda step: rate(found, step)
