"""The plot of a stored result of benchmarks/cpu: seconds over those of torch's own attention.

python -m benchmarks.cpu.plot [cpu]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ..support.report import RESULTS
from .candidates import BASE

COLOURS = {
    "ring_attn_torch": "#c2410c",
    "ring_attn_jax": "#1d4ed8",
    "ring-attention-pytorch": "#6b7280",
    "jax.nn.dot_product_attention": "#9ca3af",
}


def plot(name: str = "cpu") -> Path:
    """Plot each candidate's time over torch's own attention as bars, in a panel for forward and one for forward+backward."""
    from matplotlib.figure import Figure

    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    cells = [cell for cell in result["cells"] if cell.get("ratio") and cell["candidate"] != BASE]
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    for axes, passes in zip(panels, ("forward", "forward+backward"), strict=True):
        _panel(axes, [cell for cell in cells if cell["passes"] == passes])
        axes.set_title(passes, loc="left")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    hardware = result["hardware"]
    if not isinstance(hardware, str):  # a string if several runs were merged by hand
        hardware = f"{hardware['cpu']}, {hardware['cores']} cores"
    figure.suptitle(f"Time over torch's scaled_dot_product_attention, {hardware}, float32, 8 heads of 64")
    path = RESULTS / f"{name}.png"
    figure.savefig(path, dpi=110)
    return path


def _panel(axes: Any, cells: list[dict[str, Any]]) -> None:
    cases = list(dict.fromkeys((cell["tokens"], cell["mask"]) for cell in cells))
    names = list(dict.fromkeys(cell["candidate"] for cell in cells))
    width = 0.8 / max(len(names), 1)
    for i, name in enumerate(names):
        mine = [(cases.index((c["tokens"], c["mask"])), c["ratio"]) for c in cells if c["candidate"] == name]
        where = [at + (i - (len(names) - 1) / 2) * width for at, _ in mine]
        one_rank = name.partition(",")[0]
        bars = axes.bar(
            where,
            [ratio for _, ratio in mine],
            width * 0.9,
            label=name,
            color=COLOURS[one_rank],
            alpha=1 if name == one_rank else 0.5,
        )
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(cases)), [f"{tokens:,} {mask}" for tokens, mask in cases])
    axes.set_ylabel("x torch sdpa")
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    print(plot(*sys.argv[1:2]))
