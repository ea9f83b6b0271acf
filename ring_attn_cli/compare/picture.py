"""The plot of a comparison, in two panels: error / bound, and time. Uses matplotlib without pyplot's global state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .comparison import Comparison, VariantResult
from .sweep import SWEPT
from .variants import TITLES

INK, QUIET = "#24292F", "#6E7781"
COLOURS = "#0969DA", "#CF222E", "#1A7F37", "#9A6700", "#8250DF", "#BF3989", "#0A3069", "#656D76"
SHARE, TIME = "largest error as a share of its bound", "forward and backward, ms (median)"
LEAST = 1e-3
"""The smallest error / bound that is drawn; smaller ones are drawn at this value."""


def check(path: Path) -> None:
    if path.suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"a comparison is drawn as .png or .svg, got {path.name!r}: end the file name in one of these two")


def save(comparison: Comparison, path: Path) -> None:
    """Save the plot: a bar for each result, or lines over ``Sweep.axis`` if an argument takes several values."""
    from matplotlib.figure import Figure

    check(path)
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
    """Return the largest error / bound of a result's arrays, but at least ``LEAST``. At most 1 means that all bounds hold."""
    return max(max(quantity.relative / quantity.bound for quantity in result.quantities), LEAST)


def _draw_lines(panels: Any, comparison: Comparison) -> None:
    axis, results = comparison.sweep.axis, comparison.results
    names = [name for name in ("ranks", *SWEPT) if name != axis and len({_value(result, name) for result in results}) > 1]
    lines: dict[str, list[VariantResult]] = {}
    for result in results:
        words = [f"{_value(result, name)}{' ranks' * (name == 'ranks')}" for name in names]
        lines.setdefault(", ".join([result.variant, TITLES[result.framework], *words]), []).append(result)
    values = list(dict.fromkeys(_value(result, axis) for result in results))
    numbers = all(isinstance(value, int) for value in values)
    for number, (label, of_line) in enumerate(lines.items()):
        x = [_value(result, axis) if numbers else values.index(_value(result, axis)) for result in of_line]
        style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "marker": "o", "markersize": 4, "label": label}
        style["linestyle"] = "--" if of_line[0].framework == "jax" else "-"
        panels[0].plot(x, [share(result) for result in of_line], **style)
        panels[1].plot(x, [result.median_seconds * 1e3 for result in of_line], **style)
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
