"""Does a small language model learn as well with dilated or with summary attention as with exact attention?

    python -m benchmarks.variants [--steps 400] [--tokens 256] [--ranks 2] [--image docs/variants.png]

Three byte-level models that differ only in their attention train on Python's standard library over a ring, in both frameworks,
from the same initial weights and on the same stretches of text. The image has the six curves, each point the mean over 20 steps.
Both frameworks compute the same up to rounding, so their curves coincide until training amplifies the rounding errors.

Prediction: exact attention learns best. Summary attention comes close, because the next byte depends mostly on the last ones and
a window of 32 is exact. Dilated attention comes last, because a token at the start of a segment of 32 sees few near tokens.

Measured (results/variants.json, 400 steps): the prediction is wrong. Losses of the last 50 steps are 2.54 for exact, 2.47 for
summary and 2.41 for dilated attention: at this size and after so few steps, attention to fewer but near tokens is learned sooner.
This says nothing about long training. JAX and PyTorch differ by at most 1e-4 at any step.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from ..support import report
from ..support.process import run_fresh
from .recipe import DEPTH, DIM, HEADS, VARIANTS, Recipe

SMOOTHED = 20
"""Number of steps whose losses are averaged into one point of a curve."""

COLOURS = {"exact": "#4C78A8", "dilated": "#F58518", "summary": "#54A24B"}


def measure(framework: str, recipe: Recipe) -> dict[str, Any]:
    """Return the loss of each step and the seconds of the whole training."""
    module = {"torch": "torch_rank", "jax": "jax_process"}[framework]
    processes = recipe.ranks if framework == "torch" else 1
    found = run_fresh(f"benchmarks.variants.{module}", recipe._asdict(), processes, {"OMP_NUM_THREADS": "1"})[0]
    losses = [round(loss, 6) for loss in found["losses"]]
    return {"framework": framework, "variant": recipe.variant, "seconds": round(found["seconds"], 1), "losses": losses}


def draw(runs: list[dict[str, Any]]) -> Figure:
    """Draw the curves: PyTorch's as lines, JAX's as dots."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for run in runs:
        kept = len(run["losses"]) // SMOOTHED * SMOOTHED
        points = np.array(run["losses"][:kept]).reshape(-1, SMOOTHED).mean(1)
        steps = SMOOTHED * (np.arange(len(points)) + 0.5)
        style = "-" if run["framework"] == "torch" else "o"
        name = {"torch": "PyTorch", "jax": "JAX"}[run["framework"]]
        axes.plot(steps, points, style, color=COLOURS[run["variant"]], markersize=4, label=f"{run['variant']}, {name}")
    axes.set(xlabel="step", ylabel="loss of a byte (nats)", yscale="log")
    axes.legend()
    return figure


def show(runs: list[dict[str, Any]]) -> Table:
    table = Table(
        "attention", "framework", "first loss", "last loss", "apart", "seconds", title="the last is the mean of 50 steps"
    )
    first = {run["variant"]: np.array(run["losses"]) for run in reversed(runs)}
    for run in runs:
        losses = np.array(run["losses"])
        apart = np.max(np.abs(losses - first[run["variant"]]) / losses)
        table.add_row(
            run["variant"],
            run["framework"],
            *(f"{x:.4f}" for x in (losses[0], losses[-50:].mean())),
            f"{apart:.2g}",
            str(run["seconds"]),
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog=report.program(), description=report.first_line(__doc__))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--image", type=Path, default=Path("docs/variants.png"))
    parser.add_argument("--out", default="variants", help="name of the result file")
    options = parser.parse_args()
    model = {"layers": DEPTH, "dim": DIM, "heads": HEADS, "attention": VARIANTS}
    result: dict[str, Any] = {"question": report.first_line(__doc__), **report.environment(), "model": model, "runs": []}
    for variant in options.variants:
        for framework in ("torch", "jax"):
            result["runs"].append(measure(framework, Recipe(variant, options.steps, options.tokens, options.ranks)))
            Console(width=120).print(show(result["runs"]))
            report.save(options.out, result)  # after each, so that a later failure loses nothing
    draw(result["runs"]).savefig(options.image, dpi=120)


if __name__ == "__main__":
    main()
