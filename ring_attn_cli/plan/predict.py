"""The table of each strategy's predicted time on a machine, by the cost model in ``ring_attn_core/plan/cost.py``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ring_attn_core.plan.machine import Machine
    from ring_attn_core.problem.problem import Problem
    from ring_attn_core.problem.strategies import Strategy

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
MOST_GPUS = 4096
"""Most GPUs in a prediction; the time to compute a prediction grows with their number."""


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


def tokens(text: str) -> int:
    """Return a number of tokens such as ``8192`` or ``10M``; K, M and G stand for 2^10, 2^20 and 2^30."""
    found = re.fullmatch(r"\s*([+-]?\d+)\s*([kKmMgG]?)\s*", text)
    if found is None:
        raise ValueError(f"{text!r} is not a number of tokens such as 8192, 128K or 10M")
    return int(found[1]) * UNITS[found[2].upper()]


def heads_of(model: str | None, heads: str | None, head_dim: int | None) -> tuple[str, int]:
    """Return the heads, as ``32/8``, and the head dimension: the model's, or those passed, by default ``32/8`` and 128."""
    if model is None:
        return "32/8" if heads is None else heads, 128 if head_dim is None else head_dim
    if heads is not None or head_dim is not None:
        raise ValueError("--model gives the heads and their size: leave out --heads and --head-dim")
    from .memory import config_of

    config = config_of(model)
    return f"{config.heads}/{config.kv_heads}", config.head_dim


def answer(prediction: PredictOptions) -> RenderableType:
    """Return a table of the predicted times, or the reason why no times are predicted."""
    from rich.console import Group
    from rich.text import Text

    from ring_attn_core.problem.auto import without_peers

    from .words import title

    machine = machine_of(prediction.machine)
    problem = problem_of(prediction, machine)
    problem.check()
    load, choice = problem.load, problem.choice
    hosts = f"{load.hosts} hosts of {load.local} GPUs" if load.hosts > 1 else f"one host of {load.local} GPUs"
    if not choice.predicted:
        return Group(Text(title(problem.plan), style="bold"), Text(choice.why))
    why = without_peers(load, machine)
    return Group(
        Text(f"{title(problem.plan)}, {load.plan.seq_local:,} a GPU", style="bold"),
        Text(f"{prediction.heads} heads of {prediction.head_dim}, bfloat16, one layer, on {hosts}, {machine.name}; predicted"),
        _table(problem),
        Text(f'"auto" with this record takes {choice.why}'),
        *([] if why is None else [Text(f'"pull" and "push" are left out: {why}')]),
    )


def machine_of(text: str) -> Machine:
    """Return the built-in machine record named ``text``, or the record in the file at the path ``text``."""
    from ring_attn_core.files import read_bytes
    from ring_attn_core.plan.machine import BUILT_IN, Machine, built_in

    if (known := built_in(text)) is not None:
        return known
    try:
        return Machine.from_json(read_bytes(Path(text)).decode())
    except FileNotFoundError:
        names = ", ".join(each.name.removeprefix("NVIDIA ") for each in BUILT_IN)
        raise ValueError(f"{text!r} is not a file, and not one of {names}, of which records are built in") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{text} is not the record of a machine: {error}") from error


def problem_of(prediction: PredictOptions, machine: Machine) -> Problem:
    """Return the attention call to predict, with one batch row in bfloat16. ``Problem.check`` checks the rest."""
    from ring_attn_core import layouts, masks
    from ring_attn_core.problem.options import Options
    from ring_attn_core.problem.problem import Problem

    if not 2 <= prediction.gpus <= MOST_GPUS:
        raise ValueError(f"--gpus must be 2 to {MOST_GPUS}, got {prediction.gpus}")
    if prediction.host_gpus < 1:
        raise ValueError(f"--host-gpus must be at least 1, got {prediction.host_gpus}")
    found = re.fullmatch(r"(\d+)(?:/(\d+))?", prediction.heads)
    if found is None:
        raise ValueError(f"--heads must be query heads, or query and key heads, such as 32/8, got {prediction.heads!r}")
    heads, kv_heads = int(found[1]), int(found[2] or found[1])
    local = layouts.padded_local(prediction.layout, prediction.gpus, prediction.length)
    q, k = (1, local, heads, prediction.head_dim), (1, local, kv_heads, prediction.head_dim)
    options = Options(layout=prediction.layout, mask=masks.parse(prediction.mask), length=prediction.length)
    where = {"device": "cuda", "framework": "torch", "machine": machine, "host_ranks": prediction.host_gpus}
    where["peer_access"] = prediction.gpus <= prediction.host_gpus
    return Problem(q, k, k, ("bfloat16",) * 3, ranks=prediction.gpus, options=options, **where)  # type: ignore[arg-type]


def _table(problem: Problem) -> RenderableType:
    from rich import box
    from rich.table import Table

    from ring_attn_core.plan.cost import memory
    from ring_attn_core.problem.auto import candidates
    from ring_attn_core.problem.strategies import group_of, name_of

    load, machine, predicted = problem.load, problem.machine, problem.choice.predicted
    assert machine is not None
    ideal = load.ideal(machine).both
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("strategy", no_wrap=True)
    for name in ("forward ms", "backward", "efficiency", "sent GiB", "backward", "memory GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for strategy in candidates(load, machine):
        held = memory(name_of(strategy), load, group_of(strategy, problem.ranks))
        seconds = predicted.get(str(strategy))
        if seconds is None:
            times = ["", "too large", ""]
        else:
            passes = [1e3 * each for each in (seconds.forward, seconds.backward)]
            times = [*(f"{ms:,.2f}" if ms < 1000 else f"{ms:,.0f}" for ms in passes), f"{ideal / seconds.both:.0%}"]
        table.add_row(str(strategy), *times, *sent(problem, strategy), f"{held / 2**30:.2f}")
    table.caption = (
        "efficiency: products alone over both passes; sent: by the rank that\n"
        "sends most; memory: beside q, k, v, out and their gradients"
    )
    table.caption_justify = "left"
    return table


def sent(problem: Problem, strategy: Strategy) -> list[str]:
    """Return the most GiB that any rank in ``load.sample`` sends in the forward and in the backward, as texts such as "0.25"."""
    from dataclasses import replace

    from ring_attn_core.problem.traffic import traffic

    named = replace(problem, options=replace(problem.options, strategy=strategy))
    passes = zip(*(traffic(named, rank) for rank in problem.load.sample), strict=True)
    return [f"{max(each.bytes for each in ranks) / 2**30:.2f}" for ranks in passes]
