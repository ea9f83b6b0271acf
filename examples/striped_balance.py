"""Shows why the layout decides the time of a causal ring: the balance of Striped Attention, planned and measured.

python examples/striped_balance.py [--length 8192] [--ranks 4] [--image striped_balance.png]

Every step of a ring lasts as long as its slowest rank, because a rank gets its next keys only when its neighbor sends them. So
the plan counts, for each step, the (query, key) pairs of the rank that computes most, and adds these up over the steps. With
``c`` tokens on each of ``n`` ranks and a causal mask the sum is

    contiguous   c (c + 1) / 2 + (n - 1) c^2      from the second step on one rank sees all of its keys, and others see none
    striped      n c (c + 1) / 2                  every rank sees half of its keys at every step, in triangles
    zigzag       c (c + 1) / 2 + (n - 1) c^2 / 2  every rank sees half of its keys, after the first step in rectangles

So striped and zigzag are up to 2 - 1 / n times as fast as contiguous (Brandon et al., "Striped Attention", arXiv:2311.09431,
whose figures show the same squares and triangles). The picture shows the share of c^2 that each rank computes at each step, by
the plan, and the milliseconds that the same step takes here. One core computes the attention of one rank after the other, each
step several times in turns. The clock counts CPU time of this thread, so other programs hardly disturb it. Nothing is sent:
the time of transfers, which a GPU hides behind the attention, is left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from itertools import product

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from ring_attn_core.layouts import LAYOUTS, padded_local
from ring_attn_core.plan.ring import RingPlan
from ring_attn_torch import Run, attend_block, causal

HEADS, HEAD_DIM = 2, 64
RANKS = (1, 2, 4, 8, 16, 32, 64)
"""The rings whose prediction is drawn."""

COLOURS = {"contiguous": "#6E7781", "striped": "#F58518", "zigzag": "#4C78A8"}

Steps = Sequence[Sequence[float]]
"""[ranks][steps] of pairs or of seconds."""


def made_plan(layout: str, ranks: int, length: int) -> RingPlan:
    """Return the plan of ``length`` tokens, padded as the layout needs it."""
    return RingPlan(layout, causal(), ranks, padded_local(layout, ranks, length), length=length)


def areas(plan: RingPlan) -> Steps:
    """Return how many (query, key) pairs each rank computes at each step."""
    return [[plan.area(rank, shift) for shift in range(plan.ranks)] for rank in range(plan.ranks)]


def ring_time(steps: Steps) -> float:
    """Return the sum over steps of what the slowest rank takes, in the unit of ``steps``."""
    return sum(max(step) for step in zip(*steps, strict=True))


def speedup(layout: str, ranks: int, length: int) -> float:
    """Return how much faster than contiguous the plan says that a ring in this layout is."""
    return ring_time(areas(made_plan("contiguous", ranks, length))) / ring_time(areas(made_plan(layout, ranks, length)))


def attend_step(plan: RingPlan, rank: int, shift: int, x: torch.Tensor) -> float:
    """Return the seconds that one step of one rank takes: every run of its queries over every run of keys that it sees."""
    began = time.thread_time()
    for (_, queries, q_start, stride), (_, keys, k_start, _) in product(
        plan.q_runs[rank], plan.k_runs[(rank - shift) % plan.ranks]
    ):
        q_run, k_run = Run(q_start, queries, stride), Run(k_start, keys, stride)
        if plan.mask.onto(q_run, k_run).area(queries, keys):
            attend_block(x[:, :queries], x[:, :keys], x[:, :keys], q_run=q_run, k_run=k_run, mask=plan.mask)
    return time.thread_time() - began


def measured(plans: dict[str, RingPlan], repeats: int) -> dict[str, Steps]:
    """Return the median seconds of every step of every rank, all of them in turns; 0 where a rank sees nothing."""
    torch.set_num_threads(1)  # a rank has a device of its own, and here one core
    tokens = max(plan.seq_local for plan in plans.values())
    x = torch.randn(1, tokens, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    seen = [
        (name, rank, shift)
        for name, plan in plans.items()
        for rank, shift in product(range(plan.ranks), repeat=2)
        if plan.area(rank, shift)
    ]
    times: dict[tuple[str, int, int], list[float]] = {at: [] for at in seen}
    for turn in range(repeats + 1):
        for name, rank, shift in seen:
            seconds = attend_step(plans[name], rank, shift, x)
            if turn:  # the first one warms up
                times[name, rank, shift].append(seconds)
    median = lambda at: statistics.median(times[at]) if at in times else 0.0
    return {
        name: [[median((name, rank, shift)) for shift in range(plan.ranks)] for rank in range(plan.ranks)]
        for name, plan in plans.items()
    }


def report(plans: dict[str, RingPlan], seconds: dict[str, Steps]) -> Table:
    """Return the numbers: balance and speedup by the plan, and what was measured."""
    table = Table(title="A causal ring: the sum over its steps of the slowest rank", title_justify="left")
    for heading in ("layout", "balance", "million pairs", "predicted", "ms", "measured"):
        table.add_column(heading, justify="left" if heading == "layout" else "right")
    pairs = {name: ring_time(areas(plan)) for name, plan in plans.items()}
    took = {name: ring_time(steps) for name, steps in seconds.items()}
    for name, plan in plans.items():
        faster = f"{pairs['contiguous'] / pairs[name]:.2f} x", f"{took['contiguous'] / took[name]:.2f} x"
        table.add_row(name, f"{plan.balance:.3f}", f"{pairs[name] / 1e6:.2f}", faster[0], f"{took[name] * 1e3:.1f}", faster[1])
    return table


def draw_steps(axes: Axes, steps: Steps, most: float, form: str) -> None:
    """Draw ``steps`` as a square a rank and step, the darker the nearer to ``most``."""
    axes.imshow(steps, cmap="Oranges", vmin=0, vmax=1.3 * most)
    if len(steps) <= 8:
        for rank, step in product(range(len(steps)), repeat=2):
            axes.text(step, rank, format(steps[rank][step], form), ha="center", va="center", size=9)
    axes.set(xticks=range(len(steps)), yticks=range(len(steps)), xlabel="step", ylabel="rank")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def draw(plans: dict[str, RingPlan], seconds: dict[str, Steps], length: int) -> Figure:
    """Above, the plan of each layout and its speedup on larger rings; below, what was measured."""
    figure = Figure(figsize=(13, 6.4), layout="constrained")
    panels = figure.subplots(2, len(plans) + 1)
    slowest = max(max(map(max, steps)) for steps in seconds.values()) * 1e3
    for (name, plan), above, below in zip(plans.items(), panels[0], panels[1], strict=False):
        share = [[area / plan.seq_local**2 for area in of_rank] for of_rank in areas(plan)]
        draw_steps(above, share, 1, ".0%")
        draw_steps(below, [[second * 1e3 for second in of_rank] for of_rank in seconds[name]], slowest, ".0f")
        above.set_title(f"{name}: share of c², by the plan", size=10)
        below.set_title(f"{name}: milliseconds, measured", size=10)
    curve, bars = panels[0][-1], panels[1][-1]
    rings = [ranks for ranks in RANKS if 2 * ranks <= length]
    took = {name: ring_time(steps) for name, steps in seconds.items()}
    for at, (name, plan) in enumerate(plans.items()):
        curve.plot(rings, [speedup(name, ranks, length) for ranks in rings], "o-", ms=3, color=COLOURS.get(name), label=name)
        both = [speedup(name, plan.ranks, length), took["contiguous"] / took[name]]
        drawn = bars.bar([at - 0.2, at + 0.2], both, 0.38, color=COLOURS.get(name))
        drawn.patches[0].set_alpha(0.45)
        bars.bar_label(drawn, fmt="%.2f", size=9)
    curve.set_xscale("log", base=2)
    curve.set(xticks=rings, xticklabels=rings, xlabel="ranks")
    curve.set_title("times as fast as contiguous, by the plan", size=10)
    curve.legend(frameon=False)
    bars.set_xticks(range(len(plans)), list(plans))
    bars.set_title("times as fast: predicted (pale), measured", size=10)
    for axes in (curve, bars):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    """Measure, print the table and write the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--length", type=int, default=8192, help="tokens of all ranks")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3, help="of every step; the median counts")
    parser.add_argument("--image", default="striped_balance.png")
    options = parser.parse_args()
    if options.repeats < 1 or options.ranks < 1 or options.length < 2 * options.ranks:
        parser.error("expected at least 1 repeat, 1 rank and 2 tokens a rank")
    plans = {layout: made_plan(layout, options.ranks, options.length) for layout in LAYOUTS}
    seconds = measured(plans, options.repeats)
    Console().print(report(plans, seconds))
    draw(plans, seconds, options.length).savefig(options.image, dpi=80)
    print(f"written: {options.image}")


if __name__ == "__main__":
    main()
