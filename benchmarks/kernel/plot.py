"""The plot of a stored result of benchmarks/kernel: TFLOP/s by length.

python -m benchmarks.kernel.plot [kernel-h200]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ..support.report import RESULTS

STYLES = {
    "ring_attn_torch": ("#c2410c", "o-"),
    "ring_attn_jax": ("#1d4ed8", "s-"),
    "ring_attn_torch, triton": ("#fb923c", "o:"),
    "FlashAttention-4": ("#111827", "^-"),
    "FlashAttention-2": ("#6b7280", "^--"),
    "cuDNN": ("#15803d", "d--"),
    "cuDNN in JAX": ("#65a30d", "v--"),
}


def plot(name: str = "kernel-h200") -> Path:
    """Plot forward and backward, one line per candidate, and save the picture beside the JSON."""
    from matplotlib.figure import Figure

    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, passes in zip(panels, ("forward", "backward"), strict=True):
        for candidate, (colour, style) in STYLES.items():
            cells = [cell for cell in result["lengths"] if cell["candidate"] == candidate and passes in cell]
            rates = [cell[passes]["tflops"] for cell in cells]
            if rates:
                axes.plot([cell["tokens"] for cell in cells], rates, style, color=colour, label=candidate)
        axes.set_xscale("log", base=2)
        axes.set_title(passes, loc="left")
        axes.set_xlabel("tokens")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("TFLOP/s")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(f"{result['hardware']['gpu']}, bfloat16, causal, 16 heads of 128, at least 16,384 tokens in all")
    path = RESULTS / f"{name}.png"
    figure.savefig(path, dpi=110)
    return path


if __name__ == "__main__":
    print(plot(*sys.argv[1:2]))
