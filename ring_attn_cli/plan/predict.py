"""The table of each strategy's predicted time on a machine, by the cost model in ``cost.py``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ring_attn_core import layouts, masks
from ring_attn_core.plan.two_level import TwoLevel
from ring_attn_core.plan.ulysses import Ulysses
from ring_attn_core.problem.auto import choose
from ring_attn_core.problem.options import Options
from ring_attn_core.problem.problem import Problem
from ring_attn_core.problem.strategies import Strategy, group_of, name_of, objection
from ring_attn_core.problem.traffic import traffic

from .cost import memory, seconds
from .gpus import GPUS, Machine
from .load import Load
from .memory import config_of
from .terminal import title

MAX_GPUS = 4096
"""Most GPUs in a prediction; the time to compute a prediction grows with their number."""

ROOM = 1 / 16
"""A strategy that takes more memory than the ring, by over this share of a rank's memory, is "too large"."""


class PredictOptions(NamedTuple):
    """The options of ``ring-attn plan --gpus`` and ``--machine``. ``heads``: ``32/8``. ``host_gpus``: GPUs per host."""

    layout: str
    mask: str
    gpus: int
    length: int
    machine: str
    heads: str
    head_dim: int
    host_gpus: int


def heads_of(model: str | None, heads: str | None, head_dim: int | None) -> tuple[str, int]:
    """Return the heads, as ``32/8``, and the head dimension: the model's, or those passed, by default ``32/8`` and 128."""
    if model is None:
        return "32/8" if heads is None else heads, 128 if head_dim is None else head_dim
    if heads is not None or head_dim is not None:
        raise ValueError("--model gives the heads and their size: leave out --heads and --head-dim")
    config = config_of(model)
    return f"{config.heads}/{config.kv_heads}", config.head_dim


def answer(prediction: PredictOptions) -> RenderableType:
    machine, problem = machine_of(prediction.machine), problem_of(prediction)
    plan, load = problem.check(), load_of(problem, prediction.host_gpus)
    taken = choose(problem, reach=load.hosts == 1)
    if not plan.travels:
        return Group(Text(title(plan), style="bold"), Text(taken.why))
    hosts = f"{load.hosts} hosts of {load.local} GPUs" if load.hosts > 1 else f"one host of {load.local} GPUs"
    return Group(
        Text(f"{title(plan)}, {plan.seq_local:,} a GPU", style="bold"),
        Text(f"{prediction.heads} heads of {prediction.head_dim}, bfloat16, one layer, on {hosts}, {machine.name}; predicted"),
        _table(problem, load, machine),
        Text(f'"auto" takes {taken.strategy}: {taken.why}'),
    )


def machine_of(text: str) -> Machine:
    found = GPUS.get(text.removeprefix("NVIDIA "))
    if found is None:
        names = ", ".join(GPUS)
        raise ValueError(f"{text!r} is not one of {names}, of which measurements are built in; a file with a record is not read")
    return found


def problem_of(prediction: PredictOptions) -> Problem:
    """Return the attention call to predict, with one batch row in bfloat16. ``Problem.check`` checks the rest."""
    if not 2 <= prediction.gpus <= MAX_GPUS:
        raise ValueError(f"--gpus must be 2 to {MAX_GPUS}, got {prediction.gpus}")
    if prediction.host_gpus < 1:
        raise ValueError(f"--host-gpus must be at least 1, got {prediction.host_gpus}")
    found = re.fullmatch(r"(\d+)(?:/(\d+))?", prediction.heads)
    if found is None:
        raise ValueError(f"--heads must be query heads, or query and key heads, such as 32/8, got {prediction.heads!r}")
    heads, kv_heads = int(found[1]), int(found[2] or found[1])
    local = layouts.padded_local(prediction.layout, prediction.gpus, prediction.length)
    q, k = (1, local, heads, prediction.head_dim), (1, local, kv_heads, prediction.head_dim)
    options = Options(layout=prediction.layout, mask=masks.parse(prediction.mask), length=prediction.length)
    return Problem(q, k, k, ("bfloat16",) * 3, "cuda", prediction.gpus, options, capability=90, framework="torch")  # type: ignore[arg-type]


def load_of(problem: Problem, host_gpus: int) -> Load:
    return Load(problem.plan, problem.q_shape[2], problem.k_shape[2], problem.k_shape[3], host_gpus)


def candidates(load: Load) -> Iterator[Strategy]:
    """Yield the strategies that can run the call: between GPUs of one host or of several."""
    between_hosts = (Ulysses(ranks=load.local), TwoLevel(ranks=load.local)) if load.local > 1 else ()
    for strategy in ("ring", "direct", "two_way", "gather", "ulysses", *(between_hosts if load.hosts > 1 else ("push",))):
        if objection(strategy, load.plan.ranks, load.heads, load.kv_heads) is None:
            yield strategy


def _table(problem: Problem, load: Load, machine: Machine) -> RenderableType:
    ideal = load.ideal(machine).both
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("strategy", no_wrap=True)
    for name in ("forward ms", "backward", "efficiency", "sent GiB", "backward", "memory GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for strategy in candidates(load):
        name, group = name_of(strategy), group_of(strategy, problem.ranks)
        held, times = memory(name, load, group), ["", "too large", ""]
        if held - memory("ring", load) <= ROOM * machine.memory:
            predicted = seconds(name, load, machine, group)
            ms = [1e3 * each for each in predicted]
            times = [*(f"{each:,.2f}" if each < 1000 else f"{each:,.0f}" for each in ms), f"{ideal / predicted.both:.0%}"]
        table.add_row(str(strategy), *times, *describe_sent(problem, load, strategy), f"{held / 2**30:.2f}")
    table.caption = (
        "efficiency: products alone over both passes; sent: by the rank that\n"
        "sends most; memory: beside q, k, v, out and their gradients"
    )
    table.caption_justify = "left"
    return table


def describe_sent(problem: Problem, load: Load, strategy: Strategy) -> list[str]:
    """Return the most GiB that any rank in ``load.sample`` sends in the forward and in the backward, as texts such as "0.25"."""
    named = replace(problem, options=replace(problem.options, strategy=strategy))
    passes = zip(*(traffic(named, rank) for rank in load.sample), strict=True)
    return [f"{max(each.bytes for each in ranks) / 2**30:.2f}" for ranks in passes]
