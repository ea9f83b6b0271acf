"""Print stored results of this benchmark in the form of LongCA-bench (arXiv:2510.17896).

    python -m benchmarks.ring.table ring-h200-x2 ring-window-h200-x4

The sequence length counts the tokens of all GPUs. TFLOP/s are those of a GPU, a backward counted as 2.5 forwards, as there. The
masks have its names; ours with documents is causal in each. Results without the peak memory have "-" in its place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from ..support import report
from .problem import ALONE, PASSES, STILL

COLUMNS = "attention", "mask", "sequence length", "GPUs", "forward TFLOP/s", "backward TFLOP/s", "peak GB a GPU"
MASKS = {"window": "sliding_window_causal", "documents": "causal_document"}
"""The names there of masks of ``problem.MASKS``; "full" and "causal" have the same."""


def lines(result: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the ``COLUMNS`` of each candidate that is an attention over a ring."""
    for row in result["rows"]:
        if row["candidate"] in (ALONE, STILL):
            continue
        tokens, heads, mask, layout = row["call"].split(", ")
        length = int(tokens.partition(" ")[0].replace(",", "")) * row["ranks"]
        kind = mask.partition(" ")[0]
        name = f"{row['candidate']}, {layout}, {row['framework']}, {heads}"
        rates = (f"{row[f'{each} TFLOP/s']:.1f}" for each in PASSES)
        yield name, MASKS.get(kind) or kind, f"{length:,}", str(row["ranks"]), *rates, str(row.get("peak GB", "-"))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        if (found := report.load(name)) is None or not all("call" in row for row in found.get("rows", [{}])):
            raise SystemExit(f"benchmarks/results/{name}.json has no calls: pass the name of a stored result of benchmarks.ring")
        print(f"{name}: {found['hardware']['gpu']}\n")
        for line in (COLUMNS, ["---"] * len(COLUMNS), *lines(found)):
            print(f"| {' | '.join(line)} |")
