"""What do exactness and the ring cost on a CPU, against what the frameworks ship?

    python -m benchmarks.cpu [--quick]

Batch 1, 8 heads of 64, float32, random normal; one rank and four, forward alone and forward with backward. First, each
candidate's out and gradients are checked against float64 at a length that no tile divides; a wrong candidate is reported with its
error and not timed. A cell is a fresh process (four for a ring of processes): one call to warm up, then the median of several,
and the peak memory above imports and inputs. The candidates of one case run back to back.

Prediction and measurements: results/README.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any

from rich.console import Console

from ..support import harness, report
from .candidates import BASE, CANDIDATES, DIM, HEADS, Case
from .cell import check, measure

TOKENS = (4096, 16384)
MASKS = ("causal", "full")
PASSES = ("forward", "forward+backward")
CHECKED = 1153
"""Tokens of the check: a prime, so that no tile and no ring divides it.

A candidate that cannot pad is checked at the next multiple of its ranks.
"""

BARS = (
    ("ring_attn_torch", BASE, 1.3),
    ("ring_attn_jax", BASE, 1.5),
    ("ring_attn_torch, 4 ranks", "ring_attn_torch", 1.2),
    ("ring_attn_jax, 4 ranks", "ring_attn_jax", 1.2),
    ("ring_attn_torch", "ring-attention-pytorch", 0.5),
    ("ring_attn_jax", "ring-attention-pytorch", 0.5),
)
"""Targets: two candidates, and the largest ratio of the first's time to the second's, causal at the longest length."""

console = Console(width=120)


def main() -> None:
    """Check, measure and save; a partial run does not replace the stored result."""
    options = harness.options(__doc__, quick=False, tokens=TOKENS, only=("",))
    whole = not options.quick and options.tokens == [*TOKENS] and options.only == [""]
    names = [name for name in CANDIDATES if any(part in name for part in options.only)]
    for name in (name for name in names if not CANDIDATES[name].installed):
        console.print(f"{name}: not installed, left out")
    names, result = [name for name in names if CANDIDATES[name].installed], harness.result_of(__doc__)
    checks = [row for name in names for row in check_candidate(name)]
    wrong = {(row["candidate"], row["mask"]) for row in checks if not row["correct"]}
    cells = []
    for tokens, mask, passes in product(TOKENS[:1] if options.quick else options.tokens, MASKS, PASSES):
        right = [name for name in names if (name, mask) not in wrong]
        cells += measure_case(Case(tokens, mask), passes, right, 1 if options.quick else None)
    problem = {"batch": 1, "heads": HEADS, "dim": DIM, "dtype": "float32"}
    result |= {"problem": problem, "bars": bars(cells), "checks": checks, "cells": cells}
    show_bars(result["bars"])
    if whole:
        console.print(f"written: {report.save('cpu', result)}")


def check_candidate(name: str) -> Iterable[dict[str, Any]]:
    """Yield one row per mask with the errors of out and gradients and their bounds, and print the worst."""
    candidate = CANDIDATES[name]
    tokens = CHECKED if candidate.pads else -(-CHECKED // candidate.processes) * candidate.processes
    for mask in MASKS:
        errors = check(name, Case(tokens, mask))
        worst = max(errors, key=lambda result: errors[result][0] / errors[result][1])
        error, bound = errors[worst]
        wrong = [result for result, (got, most) in errors.items() if got > most]
        verdict = f"[red]WRONG: {', '.join(wrong)}[/]" if wrong else "[green]exact[/]"
        console.print(f"{name:32} {mask:7} {tokens} tokens  {verdict}, worst {worst}: error {error:.1e}, allowed {bound:.1e}")
        yield {
            "candidate": name,
            "mask": mask,
            "tokens": tokens,
            "correct": not wrong,
            "wrong": wrong,
            "relative_errors": {result: {"error": got, "allowed": most} for result, (got, most) in errors.items()},
        }


def measure_case(case: Case, passes: str, names: list[str], repeats: int | None) -> list[dict[str, Any]]:
    """Measure all candidates of one case, back to back; the ratio is to torch's own attention in this case."""
    rows: list[dict[str, Any]] = []
    base = None
    for name in names:
        found = measure(name, case, passes, repeats or (5 if case.tokens <= 4096 else 3))
        row = {"candidate": name, "tokens": case.tokens, "mask": case.mask, "passes": passes}
        if "refused" in found:
            rows.append({**row, "refused": found["refused"]})
            continue
        base = found["seconds"] if name == BASE else base
        rows.append(
            {
                **row,
                "seconds": round(found["seconds"], 4),
                "repeats": [round(seconds, 4) for seconds in found["times"]],
                "gflops": round(case.flops(passes) / found["seconds"] / 1e9, 1),
                "peak_mib": round(found["peak_bytes"] / 2**20, 1),
                "ratio": round(found["seconds"] / base, 3) if base else None,
            }
        )
    show_case(case, passes, rows)
    return rows


def show_case(case: Case, passes: str, rows: list[dict[str, Any]]) -> None:
    names = {"candidate": "candidate", "seconds": "seconds", "gflops": "GFLOP/s", "peak_mib": "peak MiB", "ratio": f"of {BASE}"}
    shown = [{title: row.get(name, row.get("refused")) for name, title in names.items()} for row in rows]
    console.print(harness.table(shown, f"{case.tokens:,} tokens, {case.mask}, {passes}"))


def bars(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each target of ``BARS`` with the measured ratio."""
    longest = max(cell["tokens"] for cell in cells)
    seconds = {
        (cell["candidate"], cell["passes"]): cell["seconds"]
        for cell in cells
        if cell["tokens"] == longest and cell["mask"] == "causal" and "seconds" in cell
    }
    found = []
    for (mine, other, most), passes in product(BARS, PASSES):
        if (mine, passes) in seconds and (other, passes) in seconds:
            ratio = round(seconds[mine, passes] / seconds[other, passes], 3)
            case = f"{longest:,} causal, {passes}"
            found.append(
                {"claim": f"{mine} / {other}", "case": case, "at_most": most, "measured": ratio, "reached": ratio <= most}
            )
    return found


def show_bars(found: list[dict[str, Any]]) -> None:
    for bar in found:
        verdict = "[green]reached[/]" if bar["reached"] else "[red]missed[/]"
        console.print(f"{bar['claim']:48} {bar['case']:32} {bar['measured']:5.2f} x of {bar['at_most']} x {verdict}")


if __name__ == "__main__":
    main()
