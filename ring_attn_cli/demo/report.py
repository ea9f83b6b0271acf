"""The printed report of the demo and the files it writes."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ring_attn_core import __version__

from ..plan import image, words
from . import training
from .exactness import CLOSE, HEAD_DIM, HEADS, KV_HEADS, PARTS, CheckRow
from .judge import Check, missed
from .settings import DemoSettings

if TYPE_CHECKING:
    from .gathered import Gathered

STYLES: dict[str, dict[str, Any]] = {
    "PyTorch": {"color": "#E45756", "linewidth": 6, "alpha": 0.4},
    "JAX": {"color": "#4C78A8", "marker": "o", "markersize": 4},
}
"""Line styles in losses.png, by framework, chosen so that both lines stay visible where they coincide."""

ROUNDING = 2.0**-24


def opening(settings: DemoSettings, left_out: list[str]) -> Group:
    """Return a printable description of the run with the messages ``left_out`` about frameworks that are not installed."""
    plan = settings.plan
    travel = words.travel_in_words(plan)
    lines = [
        f"[bold]{words.title(plan)}[/]",
        f"Python's standard library as text, byte by byte; every rank holds {plan.seq_local:,} tokens.",
        travel[0].upper() + travel[1:] + ".",
        *(f"[yellow]{escape(line)}[/]" for line in left_out),
        "",
    ]
    return Group(*lines)


def exactness(rows: list[CheckRow], frameworks: list[str]) -> Group:
    """Return the table of errors: each array against exact attention, one device and, if both ran, the other framework."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), title="Is the ring exact?", title_justify="left", title_style="bold")
    column = partial(table.add_column, justify="right", no_wrap=True)
    table.add_column("")
    for name in frameworks:
        column(f"{name}\n- exact")
    column("\nbound", style="dim")
    if len(frameworks) == 2:
        column(f"{frameworks[0]}\n- {frameworks[1]}")
    for name in frameworks:
        column(f"{name}\n- 1 device")
    column("")
    for row in rows:
        exact, alone = ([_number(of[name]) for name in frameworks] for of in (row.exact, row.one_device))
        between = [_number(row.frameworks)] if row.frameworks else []
        verdict = "[red]MISSED[/]" if missed(row.checks) else "[green]ok[/]"
        table.add_row(row.name, *exact, f"{row.exact[frameworks[0]].bound:.1e}", *between, *alone, verdict)
    words = (
        f"{HEADS} query heads on {KV_HEADS} key heads of {HEAD_DIM}, float32. Errors are relative: norm of the difference over "
        "norm. Exact is float64; the bound is twice the error of plain float32 attention on one device, plus a rounding. Two "
        f"float32 results, those of both frameworks or of a ring and one device, may be {CLOSE:.0e} apart."
    )
    return Group(table, Text(words, style="dim"), "")


def losses(by_framework: Mapping[str, list[float]]) -> Group:
    """Return the table of losses: a row per step, a column per framework and, if there are two, one for their difference."""
    title = "Do both frameworks learn alike?" if len(by_framework) == 2 else "Does it learn?"
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), title=title, title_justify="left", title_style="bold")
    table.add_column("step", justify="right")
    for name in by_framework:
        table.add_column(f"{name} loss", justify="right")
    if len(by_framework) == 2:
        table.add_column("difference", justify="right", style="dim")
    for step, values in enumerate(zip(*by_framework.values(), strict=True), 1):
        apart = [f"{training.difference(*values):.1e}"] if len(values) == 2 else []
        table.add_row(str(step), *(f"{value:.6f}" for value in values), *apart)
    words = "Cross-entropy in nats a byte; every step reads the next stretch of text."
    if len(by_framework) == 2:
        steps = len(next(iter(by_framework.values())))
        words += f" From the same first weights, losses may be {training.close(steps):.0e} apart at any step, relatively."
    return Group("", table, Text(words, style="dim"), "")


def verdict(checks: list[Check], files: list[Path], seconds: float) -> Group:
    """Return printable lines: each missed check, the number of missed or kept bounds, the run's time, and the files written."""
    failed = missed(checks)
    lines = [f"[red]Missed[/] {escape(str(check))}" for check in failed]
    if failed:
        lines.append(f"[bold red]{len(failed)} of {len(checks)} bounds are missed[/], in {seconds:.0f} s.")
    else:
        lines.append(f"[bold green]All {len(checks)} bounds are kept[/], in {seconds:.0f} s.")
    return Group(*lines, "Written: " + escape(", ".join(map(str, files))))


def _number(check: Check) -> str:
    return f"{check.value:.1e}" if check.passed else f"[red]{check.value:.1e}[/]"


def files(out: Path) -> list[Path]:
    """Return the paths of losses.png, plan.png and demo.json in the folder ``out``."""
    return [out / "losses.png", out / "plan.png", out / "demo.json"]


def write(out: Path, settings: DemoSettings, gathered: Gathered, seconds: float) -> list[Path]:
    """Write losses.png, plan.png and demo.json into the folder ``out`` and return their paths."""
    paths = files(out)
    plot_losses(gathered.losses, paths[0], words.title(settings.plan))
    image.save(settings.plan, paths[1])
    paths[2].write_text(json.dumps(document(settings, gathered, seconds), indent=1) + "\n")
    return paths


def document(settings: DemoSettings, gathered: Gathered, seconds: float) -> dict[str, Any]:
    """Return the checks, losses, times, settings and versions of the demo as JSON-compatible data."""
    checks = gathered.checks
    timings: dict[str, Any] = {"all": seconds, "exact float64": max(truth.seconds for truth in gathered.truth.values())}
    for name in gathered.frameworks:
        parts = {part: gathered.results[part][name].seconds for part in PARTS}
        timings[name] = {**parts, "steps": [step.seconds for step in gathered.steps[name]]}
    return {
        "passed": not missed(checks),
        "missed": [check.what for check in missed(checks)],
        "checks": [{"what": check.what, "value": check.value, "bound": check.bound, "passed": check.passed} for check in checks],
        "losses": gathered.losses,
        "seconds": timings,
        "plan": {"layout": settings.layout, "mask": "causal", "ranks": settings.ranks, "tokens": settings.tokens},
        "model": training.MODEL,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return the versions of ring-attn, Python and the installed packages that the demo uses, and the platform."""
    found = {"ring-attn": __version__, "python": platform.python_version(), "machine": platform.platform()}
    for package in ("torch", "jax", "flax", "optax", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def plot_losses(by_framework: Mapping[str, list[float]], path: Path, title: str) -> None:
    """Save a plot of the losses. For two frameworks, a lower panel shows the losses' relative difference and its bound."""
    from matplotlib.figure import Figure

    both = len(by_framework) == 2
    figure = Figure(figsize=(8, 5.6 if both else 4), layout="constrained", facecolor="white")
    axes = figure.subplots(2 if both else 1, sharex=True, squeeze=False, height_ratios=[3, 2] if both else None)[:, 0]
    steps = range(1, len(next(iter(by_framework.values()))) + 1)
    for name, values in by_framework.items():
        axes[0].plot(steps, values, label=name, **STYLES[name])
    axes[0].set_ylabel("loss (nats a byte)")
    axes[0].legend(frameon=False)
    axes[0].set_title(f"Training on Python's standard library\n{title}", loc="left", fontsize=11)
    if both:
        apart = [training.difference(*values) for values in zip(*by_framework.values(), strict=True)]
        axes[1].semilogy(steps, [max(each, ROUNDING) for each in apart], color="#24292F", marker="o", markersize=4)
        close = training.close(len(apart))
        axes[1].axhline(close, color="#24292F", linestyle="--", linewidth=1)
        axes[1].axhspan(ROUNDING / 10, ROUNDING, color="#24292F", alpha=0.06, linewidth=0)
        for height, words in ((close, "bound"), (ROUNDING, "less than float32 can tell")):
            axes[1].annotate(words, (1, height), (0, -4), textcoords="offset points", va="top", color="#6E7781")
        axes[1].set(ylabel="relative difference", ylim=(ROUNDING / 10, close * 5))
    axes[-1].set_xlabel("step")
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    for panel in axes:
        panel.grid(alpha=0.2)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
