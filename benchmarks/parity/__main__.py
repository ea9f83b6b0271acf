"""Are both rings exact over the whole grid and over pairwise combinations of all features, and how far are they apart?

    python -m benchmarks.parity

Each case runs in JAX on host devices and in PyTorch on gloo processes. Other entries of results/parity.json (rings on GPUs,
random problems) are kept. Takes about 20 minutes on 2 cores.

Legend:
  share: largest error of out, lse, dq, dk, dv against float64 over its computed bound, 1 is the limit;
  apart: largest ||JAX - PyTorch|| / ||PyTorch||
"""

from __future__ import annotations

import multiprocessing
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from rich.progress import track

from parity_tests.support.cases import SPECIAL, grid
from parity_tests.support.combinations import COMBINATIONS

from ..support import harness, report
from .compare import compare

TOGETHER = 30
"""Cases per process: XLA maps memory for each compiled program, and a process may have only so many memory maps."""


def by_dtype(rows: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each dtype with its number of cases and their largest errors."""
    grouped = defaultdict(list)
    for row in rows:
        grouped[row["dtype"]].append(row)
    for dtype, same in grouped.items():
        worst = max(same, key=lambda row: row["apart"])
        shares = {name: float(f"{max(row[name] for row in same):.3g}") for name in ("share_torch", "share_jax")}
        yield dtype, {"cases": len(same), **shares, "apart": float(f"{worst['apart']:.3g}"), "apart_case": worst["case"]}


def main() -> None:
    options = harness.options(__doc__, workers=2)  # processes that share the cases
    cases = list(dict.fromkeys([*grid(), *SPECIAL, *COMBINATIONS]))
    parts = [cases[i : i + TOGETHER] for i in range(0, len(cases), TOGETHER)]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=spawn, max_tasks_per_child=1) as workers:
        rows = [row for part in track(workers.map(compare, parts), "cases", total=len(parts)) for row in part]
    failed = [row for row in rows if "failed" in row]
    result = (report.load("parity") or {}) | harness.result_of(__doc__, cases=len(rows), failed=len(failed))
    result["legend"] = report.section(__doc__, "Legend")
    result["by_dtype"] = dict(by_dtype([row for row in rows if row not in failed]))
    print(f"{len(rows)} cases, {len(failed)} failed; written: {report.save('parity', result)}")
    for row in failed:
        print(row["case"], row["failed"])
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
