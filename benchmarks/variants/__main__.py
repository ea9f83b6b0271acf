"""Does a small language model learn as well with dilated or with summary attention as with exact attention?

    python -m benchmarks.variants [--steps 400] [--tokens 256] [--ranks 2] [--image docs/variants.png]

Three byte-level models that differ only in their attention train on Python's standard library over a ring, in both frameworks,
from the same initial weights and on the same stretches of text. The image has the six curves, each point the mean over 20 steps.
Both frameworks compute the same up to rounding, so their curves coincide until training amplifies the rounding errors.

Prediction and measurements: results/README.md.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..support import harness
from .problem import DEPTH, DIM, HEADS, VARIANTS, Problem

SMOOTHED = 20
"""Number of steps whose losses are averaged into one point of a curve."""

COLOURS = {"exact": "#4C78A8", "dilated": "#F58518", "summary": "#54A24B"}


def measured(options: Namespace) -> Iterator[dict[str, Any]]:
    """Yield the losses and the seconds of each training, and draw the curves after each."""
    runs: list[dict[str, Any]] = []
    for variant, framework in product(options.variants, harness.FRAMEWORKS):
        problem = Problem(variant, options.steps, options.tokens, options.ranks)
        module = f"benchmarks.variants.in_{framework}"
        found = harness.run_ranks(module, problem, problem.ranks, cpu=True, environment={"OMP_NUM_THREADS": "1"})[0]
        losses = [round(loss, 6) for loss in found["losses"]]
        first = np.array(next((run["losses"] for run in runs if run["variant"] == variant), losses))
        facts = {"first loss": losses[0], "mean of the last 50": round(float(np.mean(losses[-50:])), 4)}
        facts |= {"apart": f"{np.max(np.abs(losses - first) / losses):.2g}", "seconds": round(found["seconds"], 1)}
        runs.append({"framework": framework, "variant": variant, **facts, "losses": losses})
        draw(runs).savefig(options.image, dpi=120)
        yield runs[-1]


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


if __name__ == "__main__":
    sizes = {"steps": 400, "tokens": 256, "ranks": 2, "variants": [*VARIANTS]}
    options = harness.options(__doc__, **sizes, image="docs/variants.png", out="variants")
    model = {"layers": DEPTH, "dim": DIM, "heads": HEADS, "attention": VARIANTS}
    harness.record(__doc__, options.out, "runs", measured(options), model=model)
