"""The printed report of the demo, and the same as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..compare.export import describe
from ..plan import words
from .results import Check, Results, find_difference, find_missed, loss_bound
from .settings import MODEL, DemoSettings

FILE = "demo.json"


def open_report(settings: DemoSettings, left_out: list[str]) -> Group:
    """Return a printable description of the run with the messages ``left_out`` about frameworks that are not installed."""
    travel = words.travel_in_words(settings.plan)
    lines = [f"[yellow]{escape(line)}[/]" for line in left_out]
    return Group(f"[bold]{words.title(settings.plan)}[/]", travel[0].upper() + travel[1:] + ".", *lines, "")


def draw_losses(losses: dict[str, list[float]]) -> Group:
    """Return the table of losses: a row per step, a column per framework and, if there are two, one for their difference."""
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
    """Return printable lines: each missed check, and the number of missed or kept bounds with the run's time."""
    missed = find_missed(checks)
    count = f"{len(missed)} of {len(checks)} bounds are missed" if missed else f"All {len(checks)} bounds are kept"
    lines = [f"[red]Missed[/] {escape(str(check))}" for check in missed]
    return Group(*lines, f"[bold {'red' if missed else 'green'}]{count}[/], in {seconds:.0f} s.")


def write(out: Path, settings: DemoSettings, results: Results, seconds: float) -> None:
    checks = results.checks
    document = {
        "passed": not find_missed(checks),
        "missed": [check.what for check in find_missed(checks)],
        "checks": [check._asdict() | {"passed": check.passed} for check in checks],
        "losses": results.losses,
        "seconds": seconds,
        "plan": {"layout": settings.layout, "mask": "causal", "ranks": settings.ranks, "tokens": settings.tokens},
        "model": MODEL,
        "attention": describe(results.comparison),
    }
    (out / FILE).write_text(json.dumps(document, indent=1) + "\n")
