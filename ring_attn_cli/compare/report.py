"""The report of a comparison: tables, reasons and verdict for a console, and a plot of error / bound and time, by matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from .comparison import Comparison, VariantResult
from .measure import Quantity
from .sweep import SWEPT
from .variants import TITLES

WIDE = 120
"""Console columns needed for one table per case; on a narrower console each result is a table of its own."""

NARROWEST = 64
"""Columns that the table of one result needs. On a narrower terminal its lines wrap; rich would cut off the exponents."""


def width_of(columns: int) -> int:
    return max(columns, NARROWEST)


def draw(comparison: Comparison, width: int = WIDE) -> Group:
    """Return the whole report, with the reasons and the verdict, for a console of ``width`` columns."""
    results = comparison.results
    parts = [f"left out: {each.variant} in {TITLES[each.framework]}, {_name_rings(each.ranks)}: {each.reason}"
             for each in comparison.left_out]  # fmt: skip
    parts += [f"{result.label}: the truth is that of {result.part}" for result in results if result.part]
    causes = [Text.assemble((f"{result.label}: ", "bold red"), words) for result in results for words in result.diagnosis]
    judged = [quantity for result in results for quantity in result.quantities]
    missed = sum(not quantity.within for quantity in judged)
    verdict = f"{missed} of {len(judged)} bounds are missed" if missed else f"All {len(judged)} bounds are kept"
    verdict = Text(verdict, style="bold red" if missed else "bold green")
    return Group(*draw_tables(comparison, width), *(Text(words, style="dim") for words in parts), *causes, verdict)


def draw_tables(comparison: Comparison, width: int = WIDE) -> list[Table | Text]:
    """Return the tables of all results: one for each case, or one for each result if ``width`` is narrow, and their caption."""
    cases = list(dict.fromkeys(result.case for result in comparison.results))
    swept = [name for name in SWEPT if len({getattr(case, name) for case in cases}) > 1]
    parts: list[Table | Text] = []
    for case in cases:
        results = [result for result in comparison.results if result.case == case]
        names = dict.fromkeys(("mask", "layout", "dtype", "length", *swept))
        parts.append(Text(", ".join(f"{name} {getattr(case, name)}" for name in names), style="bold"))
        parts += [_draw_case(results)] if width >= WIDE else map(_draw_result, results)
        parts.append(Text(CAPTION, style="dim italic"))
    if any(result.peak_of == "process" and result.peak_bytes is not None for result in comparison.results):
        parts.append(Text(OF_PROCESS, style="dim"))
    return parts


OF_ARRAY = "error", "bound", "", "largest", "ulps", "one device", "other"
CAPTION = (
    "error: norm of the difference from float64 over its norm; largest: difference of an entry, ulps: in units of its last "
    "place; one device, other framework: = to the bit, or the relative difference; ms, MiB: forward and backward, all ranks"
)

OF_PROCESS = (
    "MiB of JAX on GPUs (*): the peak of its process so far, with inputs and all variants before, since JAX cannot reset it. Do "
    "not compare it with PyTorch's, the peak of one run without inputs"
)


def _draw_case(results: list[VariantResult]) -> Table:
    drawn = Table()
    for name in ("variant", "in", "ranks", "array"):
        drawn.add_column(name, overflow="fold")
    for name in (*OF_ARRAY, "ms", "MiB"):
        drawn.add_column(name, justify="right", no_wrap=True)
    for result in results:
        variant = result.variant.removeprefix(f"{result.framework}:")  # the next column names the framework
        who, cost = (variant, TITLES[result.framework], str(result.ranks)), _cost(result)
        for quantity in choose_shown(result.quantities):
            drawn.add_row(*who, *_cells(quantity), *cost)
            who, cost = ("", "", ""), ("", "")
        drawn.add_section()
    return drawn


def _draw_result(result: VariantResult) -> Table:
    milliseconds, memory = _cost(result)
    title = f"{result.label}: {milliseconds} ms, {memory} MiB"
    drawn = Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    drawn.add_column("array", overflow="fold")
    for name in OF_ARRAY:
        drawn.add_column(name, justify="right", no_wrap=True)
    for quantity in choose_shown(result.quantities):
        drawn.add_row(*_cells(quantity))
    return drawn


def _cost(result: VariantResult) -> tuple[str, str]:
    """Return the median time in ms and the peak memory in MiB, as text. A * marks a peak of the whole process, not of one run."""
    memory = "-" if result.peak_bytes is None else f"{result.peak_bytes / 2**20:.1f}{'*' * (result.peak_of != 'run')}"
    return f"{result.median_seconds * 1e3:.4g}", memory


MAX_QUANTITIES = 8


def choose_shown(quantities: tuple[Quantity, ...]) -> list[Quantity]:
    """Return all quantities up to ``MAX_QUANTITIES``; of more, leave out those within bounds but the largest error / bound."""
    if len(quantities) <= MAX_QUANTITIES:
        return list(quantities)
    worst = max((each for each in quantities if each.name.startswith("d")), key=lambda each: each.relative / each.bound)
    return [each for each in quantities if not each.name.startswith("d") or not each.within or each is worst]


def _cells(quantity: Quantity) -> tuple[str | Text, ...]:
    kept = Text("within", style="green") if quantity.within else Text("MISSED", style="bold red")
    numbers = f"{quantity.relative:.1e}", f"{quantity.bound:.1e}", kept, f"{quantity.largest:.1e}", f"{quantity.ulps:.3g}"
    return quantity.name, *numbers, _apart(quantity.from_one_device), _apart(quantity.from_other_framework)


def _apart(value: float | None) -> str:
    return "" if value is None else "=" if value == 0 else f"{value:.0e}"


def _name_rings(ranks: tuple[int, ...]) -> str:
    return "one device" if ranks == (1,) else f"{', '.join(map(str, ranks))} ranks"


INK, QUIET = "#24292F", "#6E7781"
COLOURS = "#0969DA", "#CF222E", "#1A7F37", "#9A6700", "#8250DF", "#BF3989", "#0A3069", "#656D76"
SHARE, TIME = "largest error as a share of its bound", "forward and backward, ms (median)"
MIN_RATIO = 1e-3
"""The smallest error / bound that is drawn; smaller ones are drawn at this value."""


def check_picture(path: Path) -> None:
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"a comparison is drawn as .png or .svg, got {path.name!r}: end the file name in one of these two")


def save(comparison: Comparison, path: Path) -> None:
    """Save the plot: a bar for each result, or lines over ``Sweep.axis`` if an argument takes several values."""
    from matplotlib.figure import Figure

    check_picture(path)
    axis = comparison.sweep.axis
    rows = len(comparison.results)
    figure = Figure(figsize=(11, 5.2 if axis else max(2.6, 1.6 + 0.3 * rows)), layout="constrained", facecolor="white")
    panels = figure.subplots(1, 2, sharey=not axis)
    (_draw_lines if axis else _draw_bars)(panels, comparison)
    for panel in panels:
        panel.grid(alpha=0.2)
        panel.spines[["top", "right"]].set_visible(False)
    names = ", ".join(dict.fromkeys(result.variant for result in comparison.results))
    figure.suptitle(f"ring-attn compare: {names}", x=0.01, ha="left", fontsize=12, color=INK)
    figure.savefig(path, dpi=150)


def share(result: VariantResult) -> float:
    """Return the largest error / bound of a result's arrays, but at least ``MIN_RATIO``. At most 1 means that all bounds hold."""
    return max(max(quantity.relative / quantity.bound for quantity in result.quantities), MIN_RATIO)


def _draw_lines(panels: Any, comparison: Comparison) -> None:
    axis, results = comparison.sweep.axis, comparison.results
    names = [name for name in ("ranks", *SWEPT) if name != axis and len({_value(result, name) for result in results}) > 1]
    lines: dict[str, list[VariantResult]] = {}
    for result in results:
        words = [f"{_value(result, name)}{' ranks' * (name == 'ranks')}" for name in names]
        lines.setdefault(", ".join([result.variant, TITLES[result.framework], *words]), []).append(result)
    values = list(dict.fromkeys(_value(result, axis) for result in results))
    numbers = all(isinstance(value, int) for value in values)
    for number, (label, line_style) in enumerate(lines.items()):
        x = [_value(result, axis) if numbers else values.index(_value(result, axis)) for result in line_style]
        style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "marker": "o", "markersize": 4, "label": label}
        style["linestyle"] = "--" if line_style[0].framework == "jax" else "-"
        panels[0].plot(x, [share(result) for result in line_style], **style)
        panels[1].plot(x, [result.median_seconds * 1e3 for result in line_style], **style)
    for panel in panels:
        panel.set_yscale("log")
        panel.set_xlabel(axis.replace("_", " "))
        if numbers:
            panel.set_xscale("log", base=2)
        panel.set_xticks(values if numbers else range(len(values)), [str(value) for value in values])
        panel.minorticks_off()
    panels[0].axhline(1, color=INK, linestyle=":", linewidth=1)
    panels[0].set_ylabel(SHARE)
    panels[1].set_ylabel(TIME)
    panels[1].legend(frameon=False, fontsize=8)


def _draw_bars(panels: Any, comparison: Comparison) -> None:
    results = comparison.results
    places, (left, right) = range(len(results)), panels
    colours = [COLOURS[2] if result.passed else COLOURS[1] for result in results]
    left.barh(places, [share(result) for result in results], height=0.7, color=colours)
    left.axvline(1, color=INK, linestyle=":", linewidth=1)
    left.set(xscale="linear" if comparison.passed else "log", xlabel=SHARE, ylim=(len(results) - 0.4, -0.6))
    left.set_yticks(places, [result.label for result in results], fontsize=8)
    milliseconds = [result.median_seconds * 1e3 for result in results]
    colours = [COLOURS[0] if result.framework == "torch" else COLOURS[3] for result in results]
    right.barh(places, milliseconds, height=0.7, color=colours)
    right.set(xlabel=TIME)
    for place, value in zip(places, milliseconds, strict=True):
        right.annotate(f" {value:.3g}", (value, place), va="center", fontsize=8, color=QUIET)


def _value(result: VariantResult, name: str) -> Any:
    return result.ranks if name == "ranks" else getattr(result.case, name)
