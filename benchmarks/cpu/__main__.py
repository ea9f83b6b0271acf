"""What do exactness and the ring cost on a CPU, against what the frameworks ship?

    python -m benchmarks.cpu [--quick]
    python -m benchmarks.cpu.plot         draws the stored result again

Batch 1, 8 heads of 64, float32, random normal; one rank and four, forward alone and forward with backward. First, each
candidate's out and gradients are checked against float64 at a length that no tile divides; a wrong candidate is reported with its
error and not timed. A cell is a fresh process (four for a ring of processes): one call to warm up, then the median of several,
and the peak memory above imports and inputs. The candidates of one case run back to back. The share of the CPUs that other
processes took meanwhile is stored with each.

Prediction:
  Products: 4 S^2 D H operations forward (half of them if causal) and 2.5 times as many backward, in one pass over the scores, for
  torch's kernel and for ours; one core reaches about 100 GFLOP/s at these shapes. So the difference is the work on a score
  between products: torch's fused kernel keeps it in the cache, ours passes over tiles of 8 MiB five times forward (mask, max,
  subtract, exp, sum). At 0.05 ns per pass on two cores and 1.28 ns for the products of a score, PyTorch takes 1.2 x torch forward
  and 1.15 x with backward; JAX takes the same or less, because XLA fuses the passes. Four ranks on two cores compute the same
  tiles and move 3 x 16 MiB of k/v per rank (and as much gradient, twice) through loopback at about 2 GB/s: 0.1 s beside 1.5 s, so
  1.1 x one rank.
  jax.nn.dot_product_attention writes all scores, causal or not: 2 x the products, six passes over 8.6 GB at 20 GB/s: 3 x or more.
  ring-attention-pytorch computes each causal tile, masks it, and transposes into each product: 3 x.

Measured (2 cores of an AMD EPYC; results/cpu.json; runs differ by 10 %):
  16,384 tokens, causal, forward / forward+backward over torch's: PyTorch 1.13 / 1.11, JAX 1.19 / 1.33 (the last of "again" in the
  file). Two changes gave this: PyTorch does not allocate memory for each product (page faults, 5 %), and JAX does not mask tiles
  in which all pairs are visible (5 % forward, 8 % backward). Before: 1.36 / 1.31 and 1.25 / 1.54. Scores in base 2 would save
  PyTorch a pass, 2 to 6 %, but lse would be rounded twice: gradients lose digits by |lse| and are infinite beyond 1e8. Four ranks
  over one: PyTorch 1.11 / 1.14, JAX 0.69 / 0.75. With one thread per rank no core waits for the other, while the two threads of
  one rank meet after each product. That, and the passes over a tile's scores, is the gap to torch's fused kernel.
  ring-attention-pytorch takes 6 to 8 times ours; its ring on 4 ranks is not timed, because its dk and dv are wrong.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from typing import Any

from rich.console import Console
from rich.table import Table

from ..support import report
from ..support.process import Others
from .candidates import BASE, CANDIDATES, DIM, HEADS, Case
from .cell import check, measure

TOKENS = (4096, 16384)
MASKS = ("causal", "full")
PASSES = ("forward", "forward+backward")
CHECKED = 1153
"""Tokens of the check: a prime, so that no tile and no ring divides it.

A candidate that cannot pad is checked at the next multiple of its ranks.
"""

QUIET = 0.05
"""Share of the CPUs that other processes may take before a measurement counts as disturbed."""

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
    options = _options()
    names = [name for name in CANDIDATES if any(part in name for part in options.only)]
    names, absent = [n for n in names if CANDIDATES[n].installed], [n for n in names if not CANDIDATES[n].installed]
    for name in absent:
        console.print(f"{name}: not installed, left out")
    environment = report.environment()
    checks = [row for name in names for row in check_candidate(name)]
    wrong = {(row["candidate"], row["mask"]) for row in checks if not row["correct"]}
    cells = []
    for tokens, mask, passes in product(options.tokens, MASKS, PASSES):
        right = [name for name in names if (name, mask) not in wrong]
        cells += measure_case(Case(tokens, mask), passes, right, options.repeats, options.patience)
    result = {
        "question": report.first_line(__doc__),
        **environment,
        "problem": {"batch": 1, "heads": HEADS, "dim": DIM, "dtype": "float32"},
        "prediction": report.section(__doc__, "Prediction"),
        "notes": report.section(__doc__, "Measured"),
        "bars": bars(cells),
        "checks": checks,
        "cells": cells,
    }
    show_bars(result["bars"])
    if options.whole:  # a partial run does not replace the stored result
        from .plot import plot

        console.print(f"written: {report.save('cpu', result)} and {plot()}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=report.program(), description=report.first_line(__doc__))
    parser.add_argument("--quick", action="store_true", help="4,096 tokens, one repeat")
    parser.add_argument("--tokens", type=int, nargs="+", help="sequence lengths")
    parser.add_argument("--only", nargs="+", default=[""], metavar="PART", help="candidates whose name contains one of these")
    parser.add_argument("--patience", type=float, default=0, help="seconds a cell may wait for other processes")
    options = parser.parse_args()
    options.whole = not options.quick and not options.tokens and options.only == [""]
    options.tokens = options.tokens or (TOKENS[:1] if options.quick else TOKENS)
    options.repeats = 1 if options.quick else None
    return options


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


def undisturbed(cell: Callable[[], dict[str, Any]], patience: float) -> tuple[dict[str, Any], float]:
    """Return ``cell()`` and the share of the CPUs that other processes took meanwhile.

    For up to ``patience`` seconds, wait until other processes leave 95 % of the CPUs, and repeat disturbed measurements. The
    measurement with the smallest share counts.
    """
    deadline = time.monotonic() + patience
    found, least = {}, float("inf")
    while True:
        wait_for_quiet(deadline)
        machine = Others()
        result = cell()
        if (others := machine.share()) < least:
            found, least = result, others
        if least < QUIET or time.monotonic() > deadline:
            return found, least


def wait_for_quiet(deadline: float) -> None:
    while time.monotonic() < deadline:
        machine = Others()
        time.sleep(1)
        if machine.share() < QUIET:
            return


def measure_case(case: Case, passes: str, names: list[str], repeats: int | None, patience: float) -> list[dict[str, Any]]:
    """Measure all candidates of one case, back to back; the ratio is to torch's own attention in this case."""
    rows: list[dict[str, Any]] = []
    base = None
    for name in names:
        found, others = undisturbed(partial(measure, name, case, passes, repeats or (5 if case.tokens <= 4096 else 3)), patience)
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
                "cpu_of_others": round(others, 3),
            }
        )
    show_case(case, passes, rows)
    return rows


def show_case(case: Case, passes: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"{case.tokens:,} tokens, {case.mask}, {passes}", title_justify="left")
    table.add_column("candidate", min_width=32)
    for name in ("seconds", "GFLOP/s", "peak MiB", f"of {BASE}"):
        table.add_column(name, justify="right")
    for row in rows:
        if "refused" in row:
            table.add_row(row["candidate"], row["refused"])
            continue
        ratio = f"{row['ratio']:.2f} x" if row["ratio"] else ""
        table.add_row(row["candidate"], f"{row['seconds']:.3f}", f"{row['gflops']:.0f}", f"{row['peak_mib']:.0f}", ratio)
    console.print(table)


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
