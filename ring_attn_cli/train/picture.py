"""The plot of a training log: loss, held-out loss by position, and the share of passkeys found."""

from __future__ import annotations

from pathlib import Path

from .loop import lines

TRAINING, HELD_OUT = "#4C78A8", "#E45756"


def draw(log: Path, path: Path) -> None:
    from matplotlib.figure import Figure

    found = lines(log)
    steps, evaluations, passkeys = ([x for x in found if x["kind"] == kind] for kind in ("step", "evaluation", "passkey"))
    figure = Figure(figsize=(12, 3.8), layout="constrained", facecolor="white")
    loss, by_position, share = panels = figure.subplots(1, 3)
    for part, marker, color, label in ((steps, None, TRAINING, "training"), (evaluations, "o", HELD_OUT, "held out")):
        loss.plot([x["step"] for x in part], [x["loss"] for x in part], marker=marker, color=color, label=label)
    loss.set(title="Loss", xlabel="step", ylabel="nats a token")
    loss.legend(frameon=False)
    for number, line in enumerate(reversed(evaluations)):
        alpha = 1 - 0.8 * number / len(evaluations)
        by_position.plot(line["ends"], line["by_position"], color=TRAINING, alpha=alpha, marker="o", markersize=3)
    by_position.set_xscale("log", base=2)
    by_position.set(
        title="Held-out loss by position, latest darkest", xlabel="tokens of its document before a token", ylabel="nats"
    )
    lengths = sorted({line["length"] for line in passkeys})
    for number, length in enumerate(lengths, 1):
        points = [(line["step"], line["accuracy"]) for line in passkeys if line["length"] == length]
        style = {"alpha": number / len(lengths), "marker": "o", "markersize": 4, "label": f"{length:,} tokens"}
        share.plot(*zip(*points, strict=True), color=TRAINING, **style)
    title = "Passkeys found, by length of the text"
    share.set(title=title, xlabel="step", ylabel="part of the texts", ylim=(-0.05, 1.05))
    if lengths:
        share.legend(frameon=False)
    for panel in panels:
        panel.grid(alpha=0.2)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
