"""The plot of a comparison, in two panels: error / bound, and time. Uses matplotlib without pyplot's global state."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .comparison import Comparison, VariantResult
from .variants import TITLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, QUIET = "#24292F", "#6E7781"
COLOURS = "#0969DA", "#CF222E", "#1A7F37", "#9A6700", "#8250DF", "#BF3989", "#0A3069", "#656D76"
LEAST = 1e-3
"""The smallest error / bound that is drawn; smaller ones are drawn at this value."""


def check(path: Path) -> None:
    """Raise ValueError if the suffix is not .png or .svg."""
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
    (_lines if axis else _bars)(panels, comparison)
    for panel in panels:
        panel.grid(alpha=0.2)
        panel.spines[["top", "right"]].set_visible(False)
    names = ", ".join(dict.fromkeys(result.variant for result in comparison.results))
    figure.suptitle(f"ring-attn compare: {names}", x=0.01, ha="left", fontsize=12, color=INK)
    figure.savefig(path, dpi=150)


def share(result: VariantResult) -> float:
    """Return the largest error / bound of a result's arrays, but at least ``LEAST``. At most 1 means that all bounds hold."""
    return max(max(quantity.relative / quantity.bound for quantity in result.quantities), LEAST)


def _lines(panels: Any, comparison: Comparison) -> None:
    axis = comparison.sweep.axis
    lines: dict[str, list[VariantResult]] = {}
    others = [name for name in ("ranks", "length", "heads", "head_dim", "dtype", "layout", "backend") if name != axis]
    differs = [name for name in others if len({_value(result, name) for result in comparison.results}) > 1]
    for result in comparison.results:
        words = [f"{_value(result, name)} {name}" if name == "ranks" else f"{_value(result, name)}" for name in differs]
        lines.setdefault(", ".join([result.variant, TITLES[result.framework], *words]), []).append(result)
    values = list(dict.fromkeys(_value(result, axis) for result in comparison.results))
    numbers = all(isinstance(value, int) for value in values)
    for number, (label, results) in enumerate(lines.items()):
        x = [_value(result, axis) if numbers else values.index(_value(result, axis)) for result in results]
        style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "marker": "o", "markersize": 4}
        style["linestyle"] = "--" if results[0].framework == "jax" else "-"
        panels[0].plot(x, [share(result) for result in results], label=label, **style)
        panels[1].plot(x, [result.median_seconds * 1e3 for result in results], label=label, **style)
    for panel in panels:
        panel.set_yscale("log")
        panel.set_xlabel(axis.replace("_", " "))
        if numbers:
            panel.set_xscale("log", base=2)
        panel.set_xticks(values if numbers else range(len(values)), [str(value) for value in values])
        panel.minorticks_off()
    panels[0].axhline(1, color=INK, linestyle=":", linewidth=1)
    panels[0].set_ylabel("largest error as a share of its bound")
    panels[1].set_ylabel("forward and backward, ms (median)")
    panels[1].legend(frameon=False, fontsize=8)


def _bars(panels: Any, comparison: Comparison) -> None:
    results = comparison.results
    places = range(len(results))
    left, right = panels
    _barh(left, [share(result) for result in results], [COLOURS[2] if result.passed else COLOURS[1] for result in results])
    left.axvline(1, color=INK, linestyle=":", linewidth=1)
    left.set(xscale="linear" if comparison.passed else "log", xlabel="largest error as a share of its bound")
    left.set_yticks(places, [result.label for result in results], fontsize=8)
    left.set_ylim(len(results) - 0.4, -0.6)
    milliseconds = [result.median_seconds * 1e3 for result in results]
    _barh(right, milliseconds, [COLOURS[0] if result.framework == "torch" else COLOURS[3] for result in results])
    right.set(xlabel="forward and backward, ms (median)")
    for place, value in zip(places, milliseconds, strict=True):
        right.annotate(f" {value:.3g}", (value, place), va="center", fontsize=8, color=QUIET)


def _barh(panel: Axes, widths: list[float], colours: list[str]) -> None:
    panel.barh(range(len(widths)), widths, height=0.7, color=colours)


def _value(result: VariantResult, name: str) -> Any:
    return result.ranks if name == "ranks" else getattr(result.case, name)
