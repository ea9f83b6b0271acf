"""The printed report of the demo, the files that it writes, and the bounds of the losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..compare.comparison import Comparison
from ..compare.export import describe
from ..plan import terminal
from .settings import MODEL, DemoSettings

FILES = "losses.png", "plan.svg", "demo.json"
STYLES: dict[str, dict[str, Any]] = {
    "PyTorch": {"color": "#E45756", "linewidth": 6, "alpha": 0.4},
    "JAX": {"color": "#4C78A8", "marker": "o", "markersize": 4},
}
"""Line styles in losses.png, by framework, chosen so that both lines stay visible where they coincide."""

ROUNDING = 2.0**-24
FALL = 0.99
"""Bound of the last loss divided by the first."""


class Check(NamedTuple):
    """A check that ``value`` is at most ``bound``; NaN fails."""

    what: str
    value: float
    bound: float

    @property
    def passed(self) -> bool:
        return self.value <= self.bound

    def __str__(self) -> str:
        return f"{self.what}: {self.value:.2e}, must be at most {self.bound:.2e}"


def find_difference(a: float, b: float) -> float:
    return abs(a - b) / abs(b)


def loss_bound(steps: int) -> float:
    """Return the allowed relative difference, at most 0.1, of two frameworks' losses after ``steps`` steps.
    Rounding errors grow: from 3e-7 after 12 steps of 16,384 tokens, tenfold every 50 steps of 512 tokens."""
    return min(1e-5 * 10 ** (steps // 50), 0.1)


def check_losses(losses: dict[str, list[float]]) -> list[Check]:
    found = [Check(f"{name} loss: last over first", each[-1] / each[0], FALL) for name, each in losses.items()]
    if len(losses) == 2:
        (first, a), (second, b) = losses.items()
        differences = [find_difference(x, y) for x, y in zip(a, b, strict=True)]
        largest = next((each for each in differences if each != each), max(differences))  # NaN is no maximum
        found.append(Check(f"loss: {first} against {second}, at the worst step", largest, loss_bound(len(a))))
    return found


def open_report(settings: DemoSettings, left_out: list[str]) -> Group:
    travel = terminal.travel_in_words(settings.plan)
    lines = [f"[yellow]{escape(line)}[/]" for line in left_out]
    return Group(f"[bold]{terminal.title(settings.plan)}[/]", travel[0].upper() + travel[1:] + ".", *lines, "")


def draw_losses(losses: dict[str, list[float]]) -> Group:
    title = "Do both frameworks learn alike?" if len(losses) == 2 else "Does it learn?"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), title=title, title_justify="left", title_style="bold")
    for name in ("step", *(f"{name} loss" for name in losses), *(["difference"] if len(losses) == 2 else [])):
        table.add_column(name, justify="right")
    for step, values in enumerate(zip(*losses.values(), strict=True), 1):
        apart = [f"{find_difference(*values):.1e}"] if len(values) == 2 else []
        table.add_row(str(step), *(f"{value:.6f}" for value in values), *apart)
    said = "Python's standard library, byte by byte, in nats a byte; every step reads the next stretch of text."
    if len(losses) == 2:
        said += f" From the same first weights, losses may be {loss_bound(table.row_count):.0e} apart at any step, relatively."
    return Group("", table, Text(said, style="dim"), "")


def conclude(checks: list[Check], seconds: float) -> Group:
    missed = [check for check in checks if not check.passed]
    count = f"{len(missed)} of {len(checks)} bounds are missed" if missed else f"All {len(checks)} bounds are kept"
    lines = [f"[red]Missed[/] {escape(str(check))}" for check in missed]
    return Group(*lines, f"[bold {'red' if missed else 'green'}]{count}[/], in {seconds:.0f} s.")


def is_passed(comparison: Comparison, checks: list[Check]) -> bool:
    """Return whether all bounds are kept, at least one of the losses among them."""
    return comparison.passed and bool(checks) and all(check.passed for check in checks)


def write(out: Path, settings: DemoSettings, comparison: Comparison, losses: dict[str, list[float]], seconds: float) -> None:
    """Write losses.png, plan.svg and demo.json into the folder ``out``."""
    plot_losses(losses, out / FILES[0], terminal.title(settings.plan))
    terminal.save(terminal.draw(settings.plan), out / FILES[1], 80)
    checks = check_losses(losses)
    document = {
        "passed": is_passed(comparison, checks),
        "checks": [check._asdict() | {"passed": check.passed} for check in checks],
        "losses": losses,
        "seconds": seconds,
        "plan": {"layout": settings.layout, "mask": "causal", "ranks": settings.ranks, "tokens": settings.tokens},
        "model": MODEL,
        "attention": describe(comparison),
    }
    (out / FILES[2]).write_text(json.dumps(document, indent=1) + "\n")


def plot_losses(losses: dict[str, list[float]], path: Path, title: str) -> None:
    """Save a plot of the losses. For two frameworks, a lower panel shows the losses' relative difference and its bound."""
    from matplotlib.figure import Figure

    both = len(losses) == 2
    figure = Figure(figsize=(8, 5.6 if both else 4), layout="constrained", facecolor="white")
    axes = figure.subplots(2 if both else 1, sharex=True, squeeze=False, height_ratios=[3, 2] if both else None)[:, 0]
    steps = range(1, len(next(iter(losses.values()))) + 1)
    for name, values in losses.items():
        axes[0].plot(steps, values, label=name, **STYLES[name])
    axes[0].set_ylabel("loss (nats a byte)")
    axes[0].legend(frameon=False)
    axes[0].set_title(f"Training on Python's standard library\n{title}", loc="left", fontsize=11)
    if both:
        apart = [max(find_difference(*values), ROUNDING) for values in zip(*losses.values(), strict=True)]
        axes[1].semilogy(steps, apart, color="#24292F", marker="o", markersize=4)
        close = loss_bound(len(apart))
        axes[1].axhline(close, color="#24292F", linestyle="--", linewidth=1)
        axes[1].axhspan(ROUNDING / 10, ROUNDING, color="#24292F", alpha=0.06, linewidth=0)
        for height, said in ((close, "bound"), (ROUNDING, "less than float32 can tell")):
            axes[1].annotate(said, (1, height), (0, -4), textcoords="offset points", va="top", color="#6E7781")
        axes[1].set(ylabel="relative difference", ylim=(ROUNDING / 10, close * 5))
    axes[-1].set_xlabel("step")
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    for panel in axes:
        panel.grid(alpha=0.2)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
