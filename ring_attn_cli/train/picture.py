"""The plot of a training log: loss, held-out loss by position, and the share of passkeys found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .loop import lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#4C78A8", "#E45756"


def draw(log: Path, path: Path) -> None:
    """Plot the log.jsonl at ``log`` and write the picture to ``path``."""
    from matplotlib.figure import Figure

    found = lines(log)
    figure = Figure(figsize=(12, 3.8), layout="constrained", facecolor="white")
    panels = figure.subplots(1, 3)
    for panel, fill in zip(panels, (_losses, _by_position, _passkeys), strict=True):
        fill(panel, found)
        panel.grid(alpha=0.2)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _of(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [line for line in found if line["kind"] == kind]


def _losses(panel: Axes, found: list[dict[str, Any]]) -> None:
    for kind, color, label in (("step", INK[0], "training"), ("evaluation", INK[1], "held out")):
        of = _of(found, kind)
        marker = "o" if kind == "evaluation" else None
        panel.plot([line["step"] for line in of], [line["loss"] for line in of], color=color, label=label, marker=marker)
    panel.set(title="Loss", xlabel="step", ylabel="nats a token")
    panel.legend(frameon=False)


def _by_position(panel: Axes, found: list[dict[str, Any]]) -> None:
    of = _of(found, "evaluation")
    for number, line in enumerate(of):
        shade = 1 - 0.8 * (len(of) - 1 - number) / len(of)
        panel.plot(line["ends"], line["by_position"], color=INK[0], alpha=shade, marker="o", markersize=3)
    panel.set_xscale("log", base=2)
    panel.set(title="Held-out loss by position, latest darkest", xlabel="tokens of its document before a token", ylabel="nats")


def _passkeys(panel: Axes, found: list[dict[str, Any]]) -> None:
    of = _of(found, "passkey")
    lengths = sorted({line["length"] for line in of})
    for number, length in enumerate(lengths):
        at = [line for line in of if line["length"] == length]
        shade = (number + 1) / len(lengths)
        steps, parts = [line["step"] for line in at], [line["accuracy"] for line in at]
        panel.plot(steps, parts, color=INK[0], alpha=shade, marker="o", markersize=4, label=f"{length:,} tokens")
    panel.set(title="Passkeys found, by length of the text", xlabel="step", ylabel="part of the texts", ylim=(-0.05, 1.05))
    if lengths:
        panel.legend(frameon=False)
